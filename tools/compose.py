"""Composition: settings -> model, memory, executor, tokenizer -> the parts of an engine.

The one place that knows every layer. `Engine.create` loads it by name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from treadle.engine.config import EngineConfig
from treadle.engine.errors import ModelError
from treadle.engine.info import EngineInfo, Parts
from treadle.engine.memory import GB
from treadle.engine.resolve import Resolved, resolve
from treadle.engine.settings import flag
from treadle.engine.tokenizer import Tokenizer
from treadle.graphs.arena import Arena, open_arena
from treadle.graphs.assemble import build_executor
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.followers import Team
from treadle.graphs.kv_memory import KvMemory
from treadle.graphs.layers.attention import ByPhase
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import TensorParallel, local_spec
from treadle.graphs.peer import RankError
from treadle.graphs.rank_model import options_of
from treadle.graphs.rank_plan import Allocation, RankPlan
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.step import Capacity, KvGroup
from treadle.graphs.weights.load import CheckpointError, Loaded, load_model, reload_parameters
from treadle.kernels import attention_backends
from treadle.tools.compile_ahead import start_compiling
from treadle.tools.footprint import kv_shape, model_facts
from treadle.tools.machine import Room, room
from treadle.tools.parallel import described, share_of, threads_of
from treadle.tools.startup import CURRENT, Startup
from treadle.tools.survey import Survey, survey
from treadle.tools.tokenizer_source import load_tokenizer
from treadle.tools.version import treadle_version

logger = logging.getLogger("treadle")

DEPTH = 2  # steps in flight: one runs while the next is planned


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
        _check_vocabulary(tokenizer, found.spec)
    compiled = start_compiling(
        local_spec(found.spec, TensorParallel(0, found.layout.size)),
        found.dtype, found.resolved, device, tokenizer.vocab_size,
        is_sharded=found.layout.size > 1,
    )  # fmt: skip
    with startup.phase("ranks"):
        team = _start_ranks(config, found)
    executor: DeviceExecutor | RankedExecutor | None = None
    try:
        executor, resolved = _build(config, found, team, tokenizer.vocab_size, startup)
        with startup.phase("graphs"), _rank_errors():
            compiled()
            executor.prepare(all_graphs=resolved.graphs.warmup)
    except BaseException:
        if team is not None:
            team.close(at_once=True)
        if executor is not None:
            asyncio.run(executor.close())  # its threads would keep the model alive
        raise
    available = room(device).free
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, "
        "max_running_requests=%d, context_len=%d, available_%s_mem=%.2f GB",
        resolved.max_total_tokens, resolved.chunked_prefill_size,
        config.schedule.max_prefill_tokens, resolved.max_running_requests,
        resolved.context_length, "cpu" if device.is_host else "gpu", available / GB,
    )  # fmt: skip
    return Parts(
        executor,
        tokenizer,
        _info(config, found, resolved, available),
        resolved.max_running_requests,
        resolved.chunked_prefill_size,
        resolved.config,
    )


def _start_ranks(config: EngineConfig, found: Survey) -> Team | None:
    """The other ranks, which load their parts meanwhile; None where there is one rank.

    Raises: ModelError when one of them cannot start, with its reason.
    """
    layout, device = found.layout, found.device.torch_device
    if layout.size == 1:
        return None
    plan = RankPlan(
        rank=0,
        size=layout.size,
        device=str(device),
        store="",
        model_path=str(found.source.path),
        load_format=config.model.load_format,
        dtype=str(found.dtype).removeprefix("torch."),
        max_model_len=found.spec.max_position,
        seed=config.model.random_seed or 0,
        attention=tuple(found.attention.items()),
        memory_saver=config.memory.enable_memory_saver,
        num_threads=threads_of(layout),
        timeout_s=layout.timeout_s,
    )
    with _rank_errors():
        return Team(layout, plan, device.type)


@contextmanager
def _rank_errors() -> Iterator[None]:
    try:
        yield
    except RankError as error:
        raise ModelError(str(error)) from error


def _build(
    config: EngineConfig, found: Survey, team: Team | None, num_token_ids: int, startup: Startup
) -> tuple[DeviceExecutor | RankedExecutor, Resolved]:
    """Weights, then what the memory that is left has room for."""
    parallel = TensorParallel(0, found.layout.size, None if team is None else team.group)
    arena = open_arena(found.device.torch_device, config.memory.enable_memory_saver)
    with startup.phase("weights"), _rank_errors():
        loaded = _load(config, found, arena, parallel)
        available = _free(found, None if team is None else team.wait_loaded())
    facts = model_facts(
        found.spec, found.dtype, available, weights_loaded=True, is_host=found.device.is_host,
        parallel=parallel,
    )  # fmt: skip
    resolved = resolve(config, facts)
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    logger.info("Memory: %s", resolved.equation)
    allocation = _allocation(found, resolved, num_token_ids)
    with startup.phase("kv_memory"), _rank_errors():
        local = _allocate(config, found, loaded, arena, allocation, parallel, resolved)
        if team is None:
            return local, resolved
        team.allocate(allocation)
        return RankedExecutor(local, team, config.device.watchdog_timeout), resolved


def _free(found: Survey, least: int | None) -> Room:
    """What a rank's device has beside the weights; least: bytes that another rank has free."""
    here = room(found.device)
    free = here.free if least is None else min(here.free, least)
    return share_of(Room(here.capacity, free), found.layout, found.device.is_host)


def _allocation(found: Survey, resolved: Resolved, num_token_ids: int) -> Allocation:
    """What every rank makes room for."""
    graphs = resolved.graphs
    return Allocation(
        page_size=resolved.page_size,
        pages=resolved.max_total_tokens // resolved.page_size,
        slots=resolved.max_running_requests,
        max_model_len=resolved.context_length,
        vocab_size=found.spec.vocab_size,
        depth=DEPTH,
        decode_rows=graphs.buckets.decode_rows,
        prefill_tokens=graphs.buckets.prefill_tokens,
        padding=graphs.buckets.padding,
        num_token_ids=num_token_ids,
        reserve_bytes=None if found.device.is_host else graphs.reserve_bytes,
    )


def _allocate(
    config: EngineConfig,
    found: Survey,
    loaded: Loaded,
    arena: Arena,
    allocation: Allocation,
    parallel: TensorParallel,
    resolved: Resolved,
) -> DeviceExecutor:
    """This rank's KV memory and executor; started when there is no other rank."""
    decoder, device = loaded.decoder, found.device
    shape = kv_shape(decoder.spec, decoder.dtype)
    page_bytes = allocation.page_size * shape.bytes_per_token
    group = KvGroup("full", allocation.page_size, allocation.pages, page_bytes)
    capacity = Capacity((group,), allocation.slots, allocation.max_model_len, allocation.vocab_size)
    memory = KvMemory(shape, group, capacity, arena)
    half = allocation.pages * page_bytes / 2 / GB
    logger.info(
        "KV Cache is allocated. dtype: %s, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
        decoder.dtype, resolved.max_total_tokens, half, half,
    )  # fmt: skip
    logger.info("Memory pool end. avail mem=%.2f GB", room(device).free / GB)
    options = replace(
        options_of(allocation),
        budget_ms=resolved.graphs.capture_budget_ms,
        sampler=attention_backends.load_sampling(found.sampling),
        starts=parallel.size == 1,
    )
    reload_weights = partial(
        reload_parameters, loaded.parameters, found.source.path, found.spec,
        load_format=config.model.load_format, seed=config.model.random_seed or 0,
        parallel=parallel,
    )  # fmt: skip
    return build_executor(decoder, memory, capacity, device, arena, options, reload_weights)


def _load(config: EngineConfig, found: Survey, arena: Arena, parallel: TensorParallel) -> Loaded:
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
            parallel=parallel,
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
        **described(found.layout),
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
