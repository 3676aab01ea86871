"""Composition: settings -> model, memory, executor, tokenizer -> the parts of an engine.

The one place that knows every layer. `Engine.create` loads it by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from treadle.engine.config import EngineConfig
from treadle.engine.errors import ConfigError, ModelError
from treadle.engine.info import EngineInfo, Parts
from treadle.engine.memory import GB
from treadle.engine.resolve import Resolved, context_length, resolve
from treadle.engine.settings import flag
from treadle.engine.tokenizer import Tokenizer
from treadle.graphs.arena import Arena, open_arena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.device import Device, has_bf16_arithmetic, open_device
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.kv_memory import KvMemory
from treadle.graphs.layers.attention import ByPhase
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.step import Capacity, KvGroup
from treadle.graphs.weights.load import (
    CheckpointError,
    Loaded,
    load_model,
    read_spec,
    reload_parameters,
)
from treadle.kernels import attention_backends
from treadle.tools.compile_ahead import start_compiling
from treadle.tools.footprint import kv_shape, model_facts
from treadle.tools.machine import room
from treadle.tools.model_source import ModelSource, locate, resolve_model
from treadle.tools.startup import CURRENT, Startup
from treadle.tools.tokenizer_source import load_tokenizer
from treadle.tools.version import treadle_version

logger = logging.getLogger("treadle")

DEPTH = 2  # steps in flight: one runs while the next is planned
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known before the weights are loaded."""

    source: ModelSource
    tokenizer_path: Path
    device: Device
    spec: DecoderSpec
    dtype: torch.dtype
    resolved: Resolved  # from the memory that will be free
    reasons: dict[str, tuple[str, str]]  # what was chosen here: value and why, by flat name
    attention: dict[str, str]  # backend by phase
    sampling: str  # backend


def survey(config: EngineConfig) -> Survey:
    """Reads the model's description, not its weights, and decides every setting.

    Raises: ConfigError, ModelError.
    """
    config.check()
    source = resolve_model(config.model.model_path)
    given = config.model.tokenizer_path
    tokenizer_path = source.path if given is None else locate(given)
    try:
        device = open_device(config.device.device)
        spec = read_spec(source.path)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    spec = replace(spec, max_position=context_length(config, spec.max_position))
    dtype, why_dtype = _dtype(config, spec, device)
    facts = model_facts(spec, dtype, room(device), weights_loaded=False, is_host=device.is_host)
    kind = device.torch_device.type
    why_device = "given" if config.device.device else f"{'no' if kind == 'cpu' else 'a'} GPU found"
    model = config.model
    reasons = {
        "model_path": (
            model.model_path or str(source.path),
            "given" if model.model_path else "the embedded model",
        ),
        "tokenizer_path": (str(tokenizer_path), "given" if given else "the model's"),
        "served_model_name": (
            model.served_model_name or source.served_name,
            "given" if model.served_model_name else "the model's",
        ),
        "dtype": (str(dtype).removeprefix("torch."), why_dtype),
        "device": (kind, why_device),
    }
    attention = _attention(config, spec, dtype, kind)
    reasons |= {f"{phase}_attention_backend": (c.name, c.reason) for phase, c in attention.items()}
    names = {phase: choice.name for phase, choice in attention.items()}
    reasons["attention_backend"] = (" and ".join(dict.fromkeys(names.values())), "by phase, below")
    sampling = _sampling(config, kind)
    reasons["sampling_backend"] = (sampling.name, sampling.reason)
    resolved = resolve(config, facts)
    return Survey(
        source, tokenizer_path, device, spec, dtype, resolved, reasons, names, sampling.name
    )


def _attention(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, device: str
) -> dict[str, attention_backends.Choice]:
    """The backend of each phase.

    Raises: ConfigError when the one asked for does not serve the model, with those that do.
    """
    needs = attention_backends.AttentionNeeds(
        device, dtype, spec.head_dim, window=any(each is not None for each in spec.windows)
    )
    kernels, chosen = config.kernels, {}
    for phase in ("prefill", "decode"):
        name = f"{phase}_attention_backend"
        asked = getattr(kernels, name) or kernels.attention_backend
        used = name if getattr(kernels, name) else "attention_backend"
        try:
            chosen[phase] = attention_backends.choose(needs, phase, asked)
        except ValueError as error:
            raise ConfigError(f"{flag(used)}: {error}") from error
    return chosen


def _sampling(config: EngineConfig, device: str) -> attention_backends.Choice:
    try:
        return attention_backends.choose_sampling(device, config.kernels.sampling_backend)
    except ValueError as error:
        raise ConfigError(f"{flag('sampling_backend')}: {error}") from error


def compose(config: EngineConfig, since: float | None = None) -> Parts:
    """Loads everything a configuration names. Takes seconds; runs off the event loop.

    since: when the caller began, on the clock of `time.perf_counter`; imports came first.
    Raises: ConfigError, ModelError.
    """
    begun = time.perf_counter() if since is None else since
    outer = CURRENT.get()
    startup = Startup(begun) if outer is None else outer
    startup.add("imports", begun)
    parts = _compose(config, startup)
    return parts if outer is not None else replace(parts, info=startup.finish(parts.info))


def _compose(config: EngineConfig, startup: Startup) -> Parts:
    with startup.phase("description"):
        found = survey(config)
        device = found.device
    with startup.phase("tokenizer"):
        tokenizer = load_tokenizer(found.tokenizer_path, model_path=found.source.path)
    arena = open_arena(device.torch_device, config.memory.enable_memory_saver)
    compiled = start_compiling(
        found.spec, found.dtype, found.resolved, device, tokenizer.vocab_size
    )
    with startup.phase("weights"):
        loaded = _load(config, found, arena)
    facts = model_facts(
        found.spec, found.dtype, room(device), weights_loaded=True, is_host=device.is_host
    )
    resolved = resolve(config, facts)
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    logger.info("Memory: %s", resolved.equation)
    executor = _build_executor(
        config, found, resolved, loaded, arena, tokenizer.vocab_size, startup
    )
    with startup.phase("graphs"):
        compiled()
        executor.prepare(all_graphs=resolved.graphs.warmup)
    available = room(device).free
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, "
        "max_running_requests=%d, context_len=%d, available_%s_mem=%.2f GB",
        resolved.max_total_tokens, resolved.chunked_prefill_size,
        config.schedule.max_prefill_tokens, resolved.max_running_requests,
        resolved.context_length, "cpu" if device.is_host else "gpu", available / GB,
    )  # fmt: skip
    _check_vocabulary(tokenizer, found.spec)
    return Parts(
        executor,
        tokenizer,
        _info(config, found, resolved, available),
        resolved.max_running_requests,
        resolved.chunked_prefill_size,
        resolved.config,
    )


def _dtype(config: EngineConfig, spec: DecoderSpec, device: Device) -> tuple[torch.dtype, str]:
    """`auto` is the checkpoint's own; quantized ones compute in bf16 where it is native."""
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype], "given"
    if spec.dtype in _DTYPES:
        return _DTYPES[spec.dtype], "the checkpoint's own"
    if has_bf16_arithmetic(device):
        return torch.bfloat16, "for quantized weights, on a device that multiplies it natively"
    return torch.float32, "for quantized weights, on a device without bf16 arithmetic"


def _load(config: EngineConfig, found: Survey, arena: Arena) -> Loaded:
    before, started = room(found.device).free, time.perf_counter()
    logger.info("Load weight begin. avail mem=%.2f GB", before / GB)
    with _checkpoint_errors():
        loaded = load_model(
            found.source.path,
            found.spec,
            load_format=config.model.load_format,
            dtype=found.dtype,
            allocate=partial(arena.empty, "weights"),
            progress=_Progress(),
            seed=config.model.random_seed or 0,
        )
    loaded.decoder.attention_backend = ByPhase(
        **{phase: attention_backends.load(name) for phase, name in found.attention.items()}
    )
    after = room(found.device).free
    logger.info(
        "Load weight end. elapsed=%.2f s, type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        time.perf_counter() - started, found.spec.architecture, found.dtype, after / GB,
        (before - after) / GB,
    )  # fmt: skip
    return loaded


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
    config: EngineConfig,
    found: Survey,
    resolved: Resolved,
    loaded: Loaded,
    arena: Arena,
    num_token_ids: int,
    startup: Startup,
) -> DeviceExecutor:
    decoder, device, spec = loaded.decoder, found.device, found.spec
    shape = kv_shape(spec, decoder.dtype)
    page_bytes = resolved.page_size * shape.bytes_per_token
    pages = resolved.max_total_tokens // resolved.page_size
    group = KvGroup("full", resolved.page_size, pages, page_bytes)
    capacity = Capacity(
        (group,), resolved.max_running_requests, resolved.context_length, spec.vocab_size
    )
    with startup.phase("kv_memory"):
        memory = KvMemory(shape, group, capacity, arena)
    half = pages * page_bytes / 2 / GB
    logger.info(
        "KV Cache is allocated. dtype: %s, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
        decoder.dtype, resolved.max_total_tokens, half, half,
    )  # fmt: skip
    logger.info("Memory pool end. avail mem=%.2f GB", room(device).free / GB)
    graphs = resolved.graphs
    options = ExecutorOptions(
        depth=DEPTH,
        buckets=graphs.buckets,
        budget_ms=graphs.capture_budget_ms,
        reserve_bytes=None if device.is_host else graphs.reserve_bytes,
        num_token_ids=num_token_ids,
        sampler=attention_backends.load_sampling(found.sampling),
    )
    reload_weights = partial(
        reload_parameters, loaded.parameters, found.source.path, spec,
        load_format=config.model.load_format, seed=config.model.random_seed or 0,
    )  # fmt: skip
    return build_executor(decoder, memory, capacity, device, arena, options, reload_weights)


def _info(
    config: EngineConfig, found: Survey, resolved: Resolved, available_bytes: int
) -> EngineInfo:
    spec = found.spec
    chosen = {name: value for name, (value, _) in found.reasons.items()}
    whys = {name: why for name, (_, why) in found.reasons.items()} | dict(resolved.reasons)
    args: dict[str, object] = {
        **resolved.config.values(),
        **chosen,
        "max_total_tokens": resolved.max_total_tokens,
        "max_total_num_tokens": resolved.max_total_tokens,
        **dict.fromkeys(("tp_size", "dp_size", "pp_size"), 1),
        "disaggregation_mode": "null",
        "reasons": {flag(key): why for key, why in whys.items()},
        "memory_gb": resolved.equation.terms(),
    }
    name = chosen["served_model_name"]
    return EngineInfo(
        served_model_name=name,
        model_path=chosen["model_path"],
        tokenizer_path=chosen["tokenizer_path"],
        architectures=(spec.architecture,),
        model_type=spec.architecture.removesuffix("ForCausalLM").lower(),
        max_model_len=resolved.context_length,
        vocab_size=spec.vocab_size,
        created=int(time.time()),
        version=treadle_version(),
        server_args=args,
        weight_bytes=resolved.equation.weights,
        kv_bytes=resolved.equation.kv,
        available_bytes=available_bytes,
    )


def _check_vocabulary(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding only "
            f"{spec.vocab_size}; --tokenizer-path must name the model's own tokenizer"
        )
