"""A real executor's memory goes and comes back under running requests, graphs and all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import chain, combinations

import pytest
import torch
from fake_engine import make_parts
from tiny_engine import SPEC as TINY

from treadle.engine import Engine, InvalidRequest, SamplingParams
from treadle.graphs.arena import HostArena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.backends import Eager, GraphBackend, HostGraphs
from treadle.graphs.buckets import Buckets
from treadle.graphs.device import HostDevice
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.fake import FakeExecutor
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import RopeSpec
from treadle.graphs.step import MEMORY_TAGS, Capacity, KvGroup, MemoryTag
from treadle.graphs.weights.dummy import fill_randomly
from treadle.kernels import host

VOCAB = 304
SPEC = replace(  # sizes that every kernel of the host serves, so that all of a step is captured
    TINY, vocab_size=VOCAB, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96,
    rope=RopeSpec(10000.0, 16),
)  # fmt: skip
SUBSETS = list(chain.from_iterable(combinations(MEMORY_TAGS, size) for size in (1, 2, 3)))
BUCKETS = Buckets((1, 2, 4, 8), (8, 32))
GROUP = KvGroup("full", 4, 512, 1)
CAPACITY = Capacity((GROUP,), 8, SPEC.max_position, VOCAB)

pytestmark = pytest.mark.skipif(
    not HostArena.can_release, reason="only Linux takes memory back from a host"
)


@dataclass
class Machine:
    """An executor whose every tensor lies in one arena, and an engine on it."""

    arena: HostArena
    parameters: dict[str, torch.Tensor]
    memory: KvMemory
    executor: DeviceExecutor
    engine: Engine

    def is_blank(self, tag: MemoryTag) -> bool:
        """Whether nothing stands in the memory of a tag."""
        layers = [tensor for layer in self.memory.layers for tensor in layer]
        tensors = {"weights": list(self.parameters.values()), "kv_cache": layers}[tag]
        return not any(bool(tensor.any()) for tensor in tensors)

    async def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
        return [each.token_ids for each in await self.engine.generate(prompts, params)]

    async def capture_all(self) -> None:
        async with asyncio.timeout(30):
            while sum(map(len, (report := self.executor.graphs()).captured.values())) < sum(
                report.planned.values()
            ):
                await asyncio.sleep(0.01)


def host_graphs(arena: HostArena) -> GraphBackend:
    if host.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    return HostGraphs(arena, 1 << 24)


BACKENDS: dict[str, Callable[[HostArena], GraphBackend]] = {
    "eager": lambda arena: Eager(),
    "host": host_graphs,
}


@pytest.fixture(params=sorted(BACKENDS))
async def machine(request: pytest.FixtureRequest) -> AsyncIterator[Machine]:
    arena = HostArena()
    shapes = parameter_shapes(SPEC)
    parameters = {name: arena.empty("weights", s, torch.float32) for name, s in shapes.items()}
    decoder = Decoder(SPEC, parameters)

    def fill() -> None:
        fill_randomly(parameters, 0, None)
        for layer in decoder.layers:  # stronger than a usual start, so that attention matters
            layer.attention.qkv.weight.mul_(8)

    fill()
    shape = KvShape(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, torch.float32)
    memory = KvMemory(shape, GROUP, CAPACITY, arena)
    options = ExecutorOptions(buckets=BUCKETS, backend=BACKENDS[request.param](arena))
    executor = build_executor(decoder, memory, CAPACITY, HostDevice(), arena, options, fill)
    engine = Engine(replace(make_parts(FakeExecutor(CAPACITY)), executor=executor))
    yield Machine(arena, parameters, memory, executor, engine)
    await engine.shutdown()
    engine.scheduler.check_integrity()


def some_prompts() -> list[list[int]]:
    return [[random.randrange(VOCAB) for _ in range(random.randrange(3, 50))] for _ in range(5)]


@pytest.mark.parametrize("tags", [None, *SUBSETS])
async def test_answers_go_on_where_they_were_after_memory_was_away(
    machine: Machine, tags: tuple[MemoryTag, ...] | None
) -> None:
    prompts = some_prompts()
    await machine.capture_all()
    expected = await machine.answers(prompts)
    await machine.engine.flush_cache(10)
    running = asyncio.create_task(machine.answers(prompts))
    while machine.engine.load().num_used_tokens < sum(map(len, prompts)) + 20:
        await asyncio.sleep(0)
    await machine.engine.release_memory_occupation(tags)
    for tag in ("weights", "kv_cache"):
        assert machine.is_blank(tag) == (tag in (tags or MEMORY_TAGS))
    captured = machine.executor.graphs().captured
    assert any(captured.values()) == ("cuda_graph" not in (tags or MEMORY_TAGS))
    assert not running.done()
    await machine.engine.resume_memory_occupation(tags)
    assert await running == expected
    await machine.capture_all()
    assert await machine.answers(prompts) == expected


async def test_addresses_stay_through_a_release(machine: Machine) -> None:
    layers = [tensor for layer in machine.memory.layers for tensor in layer]
    tensors = [*machine.parameters.values(), *layers]
    before = [tensor.data_ptr() for tensor in tensors]
    weights = [tensor.clone() for tensor in machine.parameters.values()]
    await machine.engine.release_memory_occupation()
    await machine.engine.resume_memory_occupation()
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert all(map(torch.equal, weights, machine.parameters.values()))


async def test_memory_that_cannot_be_released_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tag: str) -> None:
        raise RuntimeError(f"{tag} memory can be released only with --enable-memory-saver")

    monkeypatch.setattr(machine.arena, "release", refuse)
    prompts = some_prompts()
    await machine.capture_all()
    expected = await machine.answers(prompts)
    with pytest.raises(InvalidRequest, match="--enable-memory-saver"):
        await machine.engine.release_memory_occupation()
    assert not machine.is_blank("weights") and any(machine.executor.graphs().captured.values())
    assert await machine.answers(prompts) == expected
