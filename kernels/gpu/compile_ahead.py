"""Compiles what serving a model launches before it is launched, in worker threads.

Knows a model's sizes, never the model. The launches are recorded from the kernels' own callers on
tensors without memory, so what is compiled is what will run.

Axes: T tokens, R rows, H query heads, K kv heads, D head dim, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from treadle.kernels.gpu import (
    activation,
    kv_store,
    norm,
    offline,
    paged_attention,
    rope,
    sampling,
)
from treadle.kernels.gpu.device import Gpu, gpu_of
from treadle.kernels.paged_attention import AttentionMeta


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one device's part of a model, and of the steps that it serves."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool  # rotary pairs are neighbours
    qk_norm: bool
    intermediate_size: int
    is_gelu: bool
    vocab_size: int  # columns of the logits
    num_token_ids: int  # of them, those that are sampled
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    windows: frozenset[int | None]  # of the layers
    max_rows: int
    max_tokens: int  # of a step
    triton_attention: bool = True
    triton_sampling: bool = True
    is_sharded: bool = False  # the logits are a part of the vocabulary, of one rank of several


@dataclass(frozen=True, slots=True)
class Compiled:
    num_kernels: int
    seconds: float


def compile_ahead(shape: ModelShape, device: torch.device, workers: int = 4) -> Compiled:
    """Compiles and loads every variant for the device; returns when all are there.

    May run beside launches: one that needs a kernel still in the making waits for it.

    Raises: whatever Triton's compiler raises.
    """
    begin = time.perf_counter()
    launches = variants(shape, gpu_of(device))
    with ThreadPoolExecutor(workers) as pool, torch.cuda.device(device):
        # in a context of its own: the mode would outlive a failure
        kernels = contextvars.copy_context().run(_compile, pool, launches)
        list(pool.map(partial(_load, device), kernels))
    return Compiled(len(kernels), time.perf_counter() - begin)


def _compile(pool: ThreadPoolExecutor, launches: Sequence[offline.Launch]) -> list[Any]:
    with triton.AsyncCompileMode(pool):
        return [launch.warm() for launch in launches]


def _load(device: torch.device, kernel: Any) -> None:
    """What the first launch would do otherwise, which no capture may: the module, the launcher."""
    made = kernel.result() if hasattr(kernel, "result") else kernel
    with torch.cuda.device(device):
        made.run  # noqa: B018


def variants(shape: ModelShape, gpu: Gpu) -> list[offline.Launch]:
    """One launch of every kernel and specialisation that serving needs."""
    found: dict[tuple[str, ...], offline.Launch] = {}
    for call in calls(shape):
        for launch in offline.record(call, gpu):
            found.setdefault(launch.variant(gpu), launch)
    return list(found.values())


def calls(shape: ModelShape) -> Iterator[Callable[[], object]]:
    """The kernels' callers on steps of every size that makes a difference."""
    for tokens in _sizes(shape.max_tokens):
        yield partial(_layer, shape, tokens)
        if shape.triton_attention and tokens > 1:
            for rows in {1, 2, min(shape.max_rows, tokens)}:
                yield partial(_attend, shape, tokens, rows, tokens)
    for rows in _sizes(shape.max_rows):
        yield partial(_layer, shape, rows)
        if shape.triton_attention:
            yield partial(_attend, shape, rows, rows, 1)
        if shape.triton_sampling:
            yield partial(_sample, shape, rows)


def _sizes(largest: int) -> list[int]:
    """1, the largest, and the powers of two between: where kernels change, they change there."""
    return sorted({largest} | {1 << bit for bit in range(largest.bit_length())})


def _layer(shape: ModelShape, tokens: int) -> None:
    """All but attention, as the decoder does it."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    hidden, weight = _empty(shape, tokens, shape.hidden_size), _empty(shape, shape.hidden_size)
    norm.rms_norm(hidden, weight, 1e-6)
    norm.add_rms_norm(hidden, _empty(shape, tokens, shape.hidden_size), weight, 1e-6)
    fused = _empty(shape, tokens, (heads + 2 * kv_heads) * dim).view(tokens, -1, dim)
    q, k, v = torch.split(fused, [heads, kv_heads, kv_heads], 1)
    if shape.qk_norm:
        q, k = (norm.rms_norm(x, _empty(shape, dim), 1e-6) for x in (q, k))
    angles = torch.empty(1 << 16, shape.rotary_dim, device="meta")
    indices = torch.empty(tokens, dtype=torch.int64, device="meta")
    _, k = rope.apply_rope(q, k, indices, angles, shape.interleaved, _empty(shape, *q.shape))
    kv_store.store_kv(k, v, *_caches(shape), indices)
    gate = activation.gelu_tanh_and_mul if shape.is_gelu else activation.silu_and_mul
    gate(_empty(shape, tokens, 2 * shape.intermediate_size))


def _attend(shape: ModelShape, tokens: int, rows: int, max_q_len: int) -> None:
    q, out = (_empty(shape, tokens, shape.num_heads, shape.head_dim) for _ in range(2))
    meta = AttentionMeta(
        torch.empty(rows + 1, dtype=torch.int32, device="meta"),
        torch.empty(rows, dtype=torch.int32, device="meta"),
        torch.empty(rows, dtype=torch.int64, device="meta"),
        torch.empty(shape.max_rows + 1, 64, dtype=torch.int32, device="meta"),
        shape.page_size,
        max_q_len,
        1 << 16,
    )
    scale = shape.head_dim**-0.5
    for window in shape.windows:
        paged_attention.paged_attention(q, *_caches(shape), meta, scale, window, out)


def _sample(shape: ModelShape, rows: int) -> None:
    logits = torch.empty(rows, shape.vocab_size, device="meta")[:, : shape.num_token_ids]
    integers = torch.empty(rows, dtype=torch.int64, device="meta")
    numbers = torch.empty(rows, device="meta")
    if shape.is_sharded:
        sampling.row_peaks(logits)
        sampling.best_keys(logits, numbers, integers, integers, 0, numbers)
        return
    for temperature in (None, numbers):
        sampling.sample(logits, temperature, integers, integers)


def _empty(shape: ModelShape, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=shape.dtype, device="meta")


def _caches(shape: ModelShape) -> tuple[Tensor, Tensor]:
    size = (1 << 16, shape.num_kv_heads, shape.head_dim)
    k_cache, v_cache = (torch.empty(size, dtype=shape.kv_dtype, device="meta") for _ in range(2))
    return k_cache, v_cache
