"""What flags and torchrun say about ranks becomes a layout, or an error that names the flag."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.engine import ConfigError
from treadle.engine.config import EngineConfig
from treadle.graphs.rank_plan import Layout
from treadle.graphs.weights.load import read_spec
from treadle.tools.machine import Room
from treadle.tools.parallel import (
    check_devices,
    check_peers,
    check_size,
    described,
    follow,
    layout_of,
    share_of,
    threads_of,
)
from treadle.tools.survey import survey
from treadle.tools.tiny_model import make_folder


def torchrun(rank: int, size: int, local_rank: int) -> dict[str, str]:
    """The variables of one of its processes."""
    return {
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": str(size), "RANK": str(rank),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


def laid_out(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Layout:
    return layout_of(EngineConfig.from_flags(flags), environment or {})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, Layout(1)),
        ({"tp": 4}, Layout(4)),
        ({"tensor_parallel_size": 2, "nccl_port": 4321}, Layout(2, port=4321)),
        (
            {"tp_size": 2, "base_gpu_id": 6, "dist_timeout": 9},
            Layout(2, base_gpu_id=6, timeout_s=9),
        ),
        (
            {"tp_size": 8, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000"},
            Layout(8, num_nodes=2, node_rank=1, init_address="10.0.0.1:5000"),
        ),
        ({"tp_size": 2, "nccl_init_addr": "[::1]:80"}, Layout(2, init_address="[::1]:80")),
    ],
)
def test_flags_become_a_layout(flags: dict[str, Any], expected: Layout) -> None:
    assert laid_out(flags) == expected


@pytest.mark.parametrize("tp_size", [1, 4])
def test_torchruns_processes_are_the_ranks(tp_size: int) -> None:
    flags = {"tp_size": tp_size, "base_gpu_id": 2, "dist_timeout": 30}
    layout = laid_out(flags, torchrun(3, 4, 1))
    assert layout == Layout(
        4, init_address="10.0.0.1:29500", timeout_s=30, base_gpu_id=2, is_launched=True, rank=3,
        local_rank=1,
    )  # fmt: skip
    assert not layout.leads and layout.spawned == () and layout.device("cuda", 3) == "cuda:3"
    assert laid_out(flags, torchrun(0, 4, 0)).leads


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        ({"tp_size": 3, "nnodes": 2, "dist_init_addr": "a:1"}, {}, "--nnodes.*3 ranks cannot be"),
        ({"tp_size": 2, "nnodes": 2}, {}, "--dist-init-addr.*need the address"),
        ({"tp_size": 2, "node_rank": 1}, {}, "--node-rank.*1 is not within 0 to 0"),
        ({"tp_size": 2, "dist_init_addr": "nowhere"}, {}, "--dist-init-addr.*expected host:port"),
        (
            {"tp_size": 4, "nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"},
            {},
            "--node-rank.*2 is not within 0 to 1",
        ),
        ({"tp_size": 2}, torchrun(0, 4, 0), "--tp-size 2 is not the 4 processes"),
    ],
)
def test_layout_that_cannot_be_is_refused_by_flag(
    flags: dict[str, Any], environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        laid_out(flags, environment)


def test_sizes_that_the_model_allows_are_named(tmp_path: Path) -> None:
    """12 query heads, 2 kv heads, an intermediate size of 96."""
    overrides = {"hidden_size": 96, "num_attention_heads": 12}
    spec = read_spec(make_folder(tmp_path, overrides=overrides))
    for size in (1, 2, 4, 6, 12):
        check_size(spec, Layout(size))
    for size in (3, 5, 8, 24):
        with pytest.raises(
            ConfigError, match=rf"^--tp-size: {size} ranks .* legal for this model: 1, 2, 4, 6, 12$"
        ):
            check_size(spec, Layout(size))


def test_start_up_says_which_sizes_are_legal_before_it_loads(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")  # would be found out later
    flags = {"model_path": str(folder), "device": "cpu", "tp_size": 3}
    with pytest.raises(ConfigError, match="^--tp-size: 3 ranks .* legal for this model: 1, 2, 4$"):
        survey(EngineConfig.from_flags(flags))


def test_start_up_of_a_rank_that_does_not_lead_is_refused(tmp_path: Path) -> None:
    flags = {
        "model_path": str(make_folder(tmp_path)), "device": "cpu", "tp_size": 2, "nnodes": 2,
        "node_rank": 1, "dist_init_addr": "127.0.0.1:5000",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="another one serves"):
        survey(EngineConfig.from_flags(flags))


def test_ranks_of_a_host_share_its_memory_and_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    room = Room(random.randrange(1000, 10**12), random.randrange(1000))
    four = Layout(4)
    assert share_of(room, four, is_host=True) == Room(room.capacity // 4, room.free // 4)
    assert share_of(room, four, is_host=False) == room  # each has a GPU of its own
    assert [threads_of(Layout(size)) for size in (1, 2, 4, 12)] == [None, 5, 2, 1]
    spread = Layout(4, num_nodes=2, init_address="a:1")
    assert share_of(room, spread, is_host=True) == Room(room.capacity // 2, room.free // 2)
    assert threads_of(spread) == 5


@pytest.mark.parametrize(
    ("flags", "kind", "is_disabled"),
    [
        ({"enable_p2p_check": True}, "cuda", True),
        ({"enable_p2p_check": True, "base_gpu_id": 4}, "cuda", False),
        ({}, "cuda", False),
        ({"enable_p2p_check": True}, "cpu", False),
    ],
)
def test_gpus_that_do_not_reach_each_other_go_through_the_host(
    flags: dict[str, Any], kind: str, is_disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU 1 is apart."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: 1 not in {one, other}
    )
    check_peers(EngineConfig.from_flags({"tp_size": 3, **flags}), Layout(3), kind)
    assert ("NCCL_P2P_DISABLE" in os.environ) == is_disabled


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {**torchrun(1, 2, 1), **where}.items():
            monkeypatch.setenv(name, value)
        config = EngineConfig.from_flags({"device": "cpu", "dist_timeout": 1})
        with pytest.raises(ConfigError, match=f"no engine at 127.0.0.1:{port}"):
            follow(config)


def test_layout_is_shown() -> None:
    layout = Layout(4, num_nodes=2, init_address="a:1")
    assert described(layout) == {"tp_size": 4, "nnodes": 2, "dp_size": 1, "pp_size": 1}


@pytest.mark.parametrize("base", [0, 3])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: base + 1)
    config = EngineConfig.from_flags({"tp_size": 2, "base_gpu_id": base})
    with pytest.raises(ConfigError, match=f"need {base + 2} GPUs, this machine has {base + 1}"):
        check_devices(config, layout_of(config, {}), "cuda")
    check_devices(config, layout_of(config, {}), "cpu")
