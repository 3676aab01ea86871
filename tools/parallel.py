"""Settings -> which ranks there are, what each of them is told, and the memory they share.

Knows flags and the start-up of ranks; never what a rank runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from treadle.engine.config import EngineConfig
from treadle.engine.errors import ConfigError
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import TensorParallel, local_spec
from treadle.graphs.rank_main import follow_all
from treadle.graphs.rank_plan import Layout
from treadle.graphs.rendezvous import Address
from treadle.tools.machine import Room

logger = logging.getLogger("treadle")

TIMEOUT_S = 600.0  # for ranks to meet, and for a collective


def layout_of(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Layout:
    """From the flags, or from what torchrun says in the environment.

    Raises: ConfigError.
    """
    parallel = config.parallel
    timeout_s = float(parallel.dist_timeout or TIMEOUT_S)
    layout = Layout.from_torchrun(environment, timeout_s)
    if layout is not None:
        if parallel.tp_size not in (1, layout.size):
            raise ConfigError(
                f"--tp-size {parallel.tp_size} is not the {layout.size} processes that torchrun "
                "has started"
            )
        return replace(layout, base_gpu_id=config.device.base_gpu_id)
    layout = Layout(
        size=parallel.tp_size,
        num_nodes=parallel.nnodes,
        node_rank=parallel.node_rank,
        init_address=parallel.dist_init_addr,
        port=parallel.nccl_port,
        timeout_s=timeout_s,
        base_gpu_id=config.device.base_gpu_id,
    )
    try:
        layout.check()
        if layout.init_address is not None:
            Address.parse(layout.init_address)
    except ValueError as error:
        flags = "--tp-size, --nnodes, --node-rank, --dist-init-addr"
        raise ConfigError(f"{flags}: {error}") from error
    return layout


def follow(config: EngineConfig) -> int:
    """Runs this machine's ranks of an engine that another one serves. Returns the exit code.

    Raises: ConfigError.
    """
    layout = layout_of(config)
    kind = (config.device.device or ("cuda" if torch.cuda.is_available() else "cpu")).split(":")[0]
    logger.info("Ranks of machine %d join %s", layout.node_rank, layout.init_address)
    try:
        return follow_all(layout, kind)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"no engine at {layout.init_address}: {error}") from error


def check_size(spec: DecoderSpec, layout: Layout) -> None:
    """Raises: ConfigError when the model cannot be shared by so many, with the sizes that can."""
    try:
        local_spec(spec, TensorParallel(0, layout.size))
    except ValueError as error:
        raise ConfigError(f"--tp-size: {error}") from error


def share_of(room: Room, layout: Layout, is_host: bool) -> Room:
    """What one rank may call its own: a host's memory is shared by the ranks of a node."""
    if not is_host:
        return room
    return Room(room.capacity // layout.per_node, room.free // layout.per_node)


def threads_of(layout: Layout) -> int | None:
    """Threads of a rank's host kernels; None: all, when there is one rank."""
    if layout.size == 1:
        return None
    return max(1, (os.cpu_count() or 1) // layout.per_node)


def check_devices(config: EngineConfig, layout: Layout, kind: str) -> None:
    """Raises: ConfigError when this machine has fewer GPUs than ranks."""
    first, count = config.device.base_gpu_id, torch.cuda.device_count()
    if kind == "cuda" and not layout.is_launched and first + layout.per_node > count:
        raise ConfigError(
            f"--tp-size, --base-gpu-id: {layout.per_node} ranks from GPU {first} on need "
            f"{first + layout.per_node} GPUs, this machine has {count}"
        )


def check_peers(config: EngineConfig, layout: Layout, kind: str) -> None:
    """With --enable-p2p-check: has NCCL do without direct access where two GPUs lack it."""
    if not config.parallel.enable_p2p_check or kind != "cuda":
        return
    first = config.device.base_gpu_id
    devices = range(first, first + layout.per_node)
    apart = [
        (one, other)
        for one in devices
        for other in devices
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        os.environ["NCCL_P2P_DISABLE"] = "1"
        logger.warning("GPUs without access to each other: %s; NCCL goes through the host", apart)


def described(layout: Layout) -> dict[str, Any]:
    """For `/server_info`."""
    return {"tp_size": layout.size, "nnodes": layout.num_nodes, "dp_size": 1, "pp_size": 1}
