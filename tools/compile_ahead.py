"""Starts compiling a GPU's kernels while the weights are read.

Knows what a model will launch only as sizes; on a host there is nothing to compile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from treadle.engine.resolve import Resolved
from treadle.graphs.device import Device
from treadle.graphs.models.spec import DecoderSpec
from treadle.kernels import gpu

logger = logging.getLogger("treadle")


def start_compiling(
    spec: DecoderSpec,
    dtype: torch.dtype,
    resolved: Resolved,
    device: Device,
    num_token_ids: int,
    is_sharded: bool,
) -> Callable[[], None]:
    """Returns what waits for the kernels. A failure costs time later, and is a warning.

    spec: of this rank's part of the model. num_token_ids: of the whole.
    """
    if device.is_host or not gpu.HAS_TRITON:
        return lambda: None
    from treadle.kernels.gpu.compile_ahead import ModelShape, compile_ahead

    largest = max(resolved.chunked_prefill_size, resolved.max_running_requests)
    shape = ModelShape(
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rope.rotary_dim,
        interleaved=spec.rope.interleaved,
        qk_norm=spec.qk_norm,
        intermediate_size=spec.intermediate_size,
        is_gelu=spec.activation != "silu",
        vocab_size=spec.vocab_size,
        num_token_ids=min(num_token_ids, spec.vocab_size),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=resolved.page_size,
        windows=frozenset(spec.windows),
        max_rows=resolved.max_running_requests,
        max_tokens=largest,
        is_sharded=is_sharded,
    )
    pool = ThreadPoolExecutor(1, thread_name_prefix="treadle-compile")
    running = pool.submit(compile_ahead, shape, device.torch_device)
    pool.shutdown(wait=False)

    def wait() -> None:
        try:
            done = running.result()
        except Exception as error:
            logger.warning("Kernels are compiled when they are first used: %s", error)
        else:
            logger.info("Compiled %d kernels in %.2f s", done.num_kernels, done.seconds)

    return wait
