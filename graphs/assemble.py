"""A decoder and its memory -> an executor with its owners: programs, graphs, capture, occupation.

The one place in `graphs` that turns options into objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from treadle.graphs.arena import Arena
from treadle.graphs.backends import CudaGraphs, Eager, GraphBackend, HostGraphs
from treadle.graphs.buckets import Buckets
from treadle.graphs.capture import BackgroundCapture
from treadle.graphs.device import Device
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.kv_memory import KvMemory
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.occupation import Occupation
from treadle.graphs.programs import Sizes
from treadle.graphs.runner import Runner
from treadle.graphs.step import Capacity
from treadle.kernels import host
from treadle.kernels.sampling import sample

logger = logging.getLogger("treadle")

NO_BUCKETS = Buckets((), ())
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """What an executor is built with beside its model."""

    depth: int = 2  # steps in flight
    buckets: Buckets = NO_BUCKETS  # none: every step runs eagerly in its own shape
    budget_ms: float = 0.0  # stall that a capture under load may cause
    reserve_bytes: int | None = None  # what graphs may take; None: no limit
    in_background: bool = True  # False: only what `prepare` captures
    num_token_ids: int | None = None  # ids that have a meaning; those beyond are never sampled
    backend: GraphBackend | None = None  # None: the device's
    sampler: Callable[..., Tensor] = sample  # `treadle.kernels.sampling.sample`'s arguments
    starts: bool = True  # False: `start` is called by whoever runs it with other ranks


def build_executor(
    decoder: Decoder,
    memory: KvMemory,
    capacity: Capacity,
    device: Device,
    arena: Arena,
    options: ExecutorOptions,
    reload_weights: Callable[[], None] | None = None,
) -> DeviceExecutor:
    """reload_weights: fills the parameters again after they were released."""
    backend, buckets = options.backend, options.buckets
    if backend is None:
        backend, buckets = _choose(decoder, device, arena, buckets)
    sizes = Sizes(options.depth, buckets, options.num_token_ids, options.sampler)
    runner = Runner(decoder, memory, capacity, device, backend, sizes)
    capture = BackgroundCapture(
        runner.graphs, options.budget_ms, options.reserve_bytes, options.in_background
    )
    occupation = None
    if reload_weights is not None:
        occupation = Occupation(arena, runner, capture, reload_weights)
    executor = DeviceExecutor(runner, device, options.depth, capture, occupation)
    if options.starts:
        executor.start()
    return executor


def _choose(
    decoder: Decoder, device: Device, arena: Arena, buckets: Buckets
) -> tuple[GraphBackend, Buckets]:
    """The device's graphs; where it has none, steps run in their own shape, without padding."""
    if not buckets.decode_rows and not buckets.prefill_tokens:
        return Eager(), NO_BUCKETS
    if not device.is_host:
        return CudaGraphs(device.torch_device), buckets
    if host.LIBRARY is None:
        logger.warning("No compiled host kernels: no graphs, every step runs eagerly")
        return Eager(), NO_BUCKETS
    if decoder.dtype.itemsize == 2 and host.kind(decoder.embedding) is None:
        logger.warning("No host kernels for %s: every step runs eagerly", decoder.dtype)
        return Eager(), NO_BUCKETS
    return HostGraphs(
        arena, workspace_bytes(decoder.spec, buckets, decoder.dtype.itemsize)
    ), buckets


def workspace_bytes(spec: DecoderSpec, buckets: Buckets, itemsize: int) -> int:
    """Address space for what the kernels of one tape hand to each other, with room to spare."""
    rows = max(buckets.decode_rows, default=0)
    tokens = max(rows, *buckets.prefill_tokens, 0)
    attention = 3 * (spec.q_size + 2 * spec.kv_size)
    width = 4 * spec.hidden_size + attention + 4 * spec.intermediate_size
    head = rows * spec.vocab_size * (itemsize + _FP32_BYTES)
    return 2 * tokens * width * itemsize + head + (1 << 20)
