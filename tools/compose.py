"""Composition: settings -> model, memory, executor, tokenizer -> the parts of an engine.

The one place that knows every layer. `Engine.create` loads it by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch

from treadle.engine.config import (
    EngineConfig,
    ModelFacts,
    Resolved,
    context_length,
    flag,
    resolve,
)
from treadle.engine.errors import ConfigError, ModelError
from treadle.engine.hf_tokenizer import load_tokenizer
from treadle.engine.info import EngineInfo, Parts
from treadle.engine.tokenizer import Tokenizer
from treadle.graphs.device import Device, has_bf16_arithmetic, open_device
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.runner import Runner
from treadle.graphs.step import Capacity, KvGroup
from treadle.graphs.weights.load import CheckpointError, load_decoder, read_spec
from treadle.tools.model_source import ModelSource, locate, resolve_model
from treadle.tools.version import treadle_version

logger = logging.getLogger("treadle")

GB = 2**30
DEPTH = 2  # steps in flight: one runs while the next is planned
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def compose(config: EngineConfig) -> Parts:
    """Loads everything a configuration names. Takes seconds; runs off the event loop.

    Raises: ConfigError, ModelError.
    """
    config.check()
    source = resolve_model(config.model.model_path)
    tokenizer_path = _tokenizer_path(config, source)
    try:
        device = open_device(config.device.device)
        spec = read_spec(source.path)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    context = context_length(config, spec.max_position)
    spec = replace(spec, max_position=context)
    tokenizer = load_tokenizer(tokenizer_path, model_path=source.path)
    dtype = _dtype(config, spec, device)
    decoder = _load(source, spec, config, dtype, device)
    executor, resolved = _build_executor(config, spec, decoder, device)
    info = _info(config, source, tokenizer_path, spec, dtype, device, resolved)
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_running_requests=%d, "
        "context_len=%d, available_%s_mem=%.2f GB",
        resolved.max_total_tokens, resolved.chunked_prefill_size, resolved.max_running_requests,
        resolved.context_length, "cpu" if device.is_host else "gpu", device.free_bytes() / GB,
    )  # fmt: skip
    _check_vocabulary(tokenizer, spec)
    return Parts(
        executor,
        tokenizer,
        info,
        resolved.max_running_requests,
        resolved.chunked_prefill_size,
        config,
    )


def _tokenizer_path(config: EngineConfig, source: ModelSource) -> Path:
    given = config.model.tokenizer_path
    return source.path if given is None else locate(given)


def _dtype(config: EngineConfig, spec: DecoderSpec, device: Device) -> torch.dtype:
    """`auto` is the checkpoint's own; quantized ones compute in bf16 where it is native."""
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype]
    if spec.dtype in _DTYPES:
        return _DTYPES[spec.dtype]
    return torch.bfloat16 if has_bf16_arithmetic(device) else torch.float32


def _load(
    source: ModelSource,
    spec: DecoderSpec,
    config: EngineConfig,
    dtype: torch.dtype,
    device: Device,
) -> Decoder:
    before, started = device.free_bytes(), time.perf_counter()
    logger.info("Load weight begin. avail mem=%.2f GB", before / GB)
    with _checkpoint_errors():
        decoder = load_decoder(
            source.path,
            spec,
            load_format=config.model.load_format,
            dtype=dtype,
            device=device.torch_device,
            progress=_Progress(),
            seed=config.model.random_seed or 0,
        )
    logger.info(
        "Load weight end. elapsed=%.2f s, type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        time.perf_counter() - started, spec.architecture, dtype, device.free_bytes() / GB,
        (before - device.free_bytes()) / GB,
    )  # fmt: skip
    return decoder


class _Progress:
    """Logs how far a slow load is, once every few seconds."""

    EVERY_S = 2.0

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.perf_counter() - self._last > self.EVERY_S:
            self._last = time.perf_counter()
            logger.info("Loading weights: %d %%", 100 * done_bytes // max(total_bytes, 1))


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ModelError(str(error)) from error


def _build_executor(
    config: EngineConfig, spec: DecoderSpec, decoder: Decoder, device: Device
) -> tuple[DeviceExecutor, Resolved]:
    shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)
    facts = ModelFacts(
        max_position=spec.max_position,
        bytes_per_token=shape.bytes_per_token,
        free_bytes=device.free_bytes(),
        is_host=device.is_host,
    )
    resolved = resolve(config, facts)
    page_bytes = resolved.page_size * shape.bytes_per_token
    pages = resolved.max_total_tokens // resolved.page_size
    group = KvGroup("full", resolved.page_size, pages, page_bytes)
    capacity = Capacity(
        (group,), resolved.max_running_requests, resolved.context_length, spec.vocab_size
    )
    memory = KvMemory(shape, group, capacity, device.torch_device)
    half = pages * page_bytes / 2 / GB
    logger.info(
        "KV Cache is allocated. dtype: %s, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
        decoder.dtype, resolved.max_total_tokens, half, half,
    )  # fmt: skip
    return DeviceExecutor(Runner(decoder, memory, capacity, device, DEPTH), device, DEPTH), resolved


def _info(
    config: EngineConfig,
    source: ModelSource,
    tokenizer_path: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: Device,
    resolved: Resolved,
) -> EngineInfo:
    name = config.model.served_model_name or source.served_name
    args: dict[str, object] = {}
    for group in (getattr(config, f.name) for f in fields(config)):
        args |= {each.name: getattr(group, each.name) for each in fields(group)}
    args |= {
        "model_path": config.model.model_path or str(source.path),
        "tokenizer_path": str(tokenizer_path),
        "served_model_name": name,
        "device": device.torch_device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": resolved.context_length,
        "page_size": resolved.page_size,
        "max_total_tokens": config.memory.max_total_tokens,
        "max_total_num_tokens": resolved.max_total_tokens,
        "max_running_requests": resolved.max_running_requests,
        "chunked_prefill_size": resolved.chunked_prefill_size,
        **dict.fromkeys(("tp_size", "dp_size", "pp_size"), 1),
        "disaggregation_mode": "null",
        "reasons": {flag(key): why for key, why in resolved.reasons.items()},
    }
    return EngineInfo(
        served_model_name=name,
        model_path=str(args["model_path"]),
        tokenizer_path=str(tokenizer_path),
        architectures=(spec.architecture,),
        model_type=spec.architecture.removesuffix("ForCausalLM").lower(),
        max_model_len=resolved.context_length,
        vocab_size=spec.vocab_size,
        created=int(time.time()),
        version=treadle_version(),
        server_args=args,
    )


def _check_vocabulary(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding only "
            f"{spec.vocab_size}; --tokenizer-path must name the model's own tokenizer"
        )
