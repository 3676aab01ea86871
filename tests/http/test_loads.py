"""What gateways and operators read of how busy the engine is and of its memory."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from treadle.graphs.step import GraphReport

if TYPE_CHECKING:
    from fake_served import FakeEngine

    from tests.http.conftest import Served

MB = 2**20


async def get(served: Served, path: str) -> Any:
    async with served.session.get(served.url + path) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_loads_have_the_core_fields(served: Served) -> None:
    served.engine.gate.clear()
    running = asyncio.create_task(served.post("/generate", {"text": "a"}))
    while not served.engine.num_running:
        await asyncio.sleep(0.001)
    answer = await get(served, "/v1/loads?include=core,disagg,queues,memory")
    assert answer["version"] == "0.0.1"
    assert answer["num_accelerators"] == 1
    (load,) = answer["loads"]
    for stamp in (answer.pop("timestamp"), load.pop("timestamp")):
        assert datetime.fromisoformat(stamp).utcoffset() is not None
    expected = {
        "dp_rank": 0,
        "num_running_reqs": 1,
        "num_waiting_reqs": 0,
        "num_used_tokens": 7,
        "max_total_num_tokens": 1000,
        "max_running_requests": 8,
        "token_usage": 0.007,
        "gen_throughput": 12.5,
        "memory": {"weight_gb": 0, "kv_cache_gb": 0, "graph_gb": 0, "token_capacity": 1000},
        "queues": {"waiting": 0},
    }
    assert {name: load[name] for name in expected} == expected
    assert "last_gen_throughput" not in load and "graphs" not in load
    served.engine.gate.set()
    await running


@pytest.mark.parametrize(
    ("include", "sections"),
    [("", {"memory", "queues"}), ("?include=all", {"memory", "queues"}),
     ("?include=core", set()), ("?include=core,memory", {"memory"}), ("?include=spec,lora", set()),
     ("?include=queues&dp_rank=0&format=json", {"queues"})],
)  # fmt: skip
async def test_sections_come_as_asked_for(served: Served, include: str, sections: set[str]) -> None:
    (load,) = (await get(served, "/v1/loads" + include))["loads"]
    assert {name for name, value in load.items() if isinstance(value, dict)} == sections


async def test_loads_as_prometheus_gauges(served: Served) -> None:
    async with served.session.get(served.url + "/v1/loads?format=prometheus") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    gauges = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert gauges['sglang_num_used_tokens{dp_rank="0"}'] == "7"
    assert gauges['sglang_gen_throughput{dp_rank="0"}'] == "12.5"
    assert gauges['sglang_memory_token_capacity{dp_rank="0"}'] == "1000"
    assert gauges['sglang_queues_waiting{dp_rank="0"}'] == "0"
    assert lines.count("# TYPE sglang_num_used_tokens gauge") == 1
    assert len(gauges) == len(lines) / 2


@pytest.mark.parametrize(
    ("query", "param"),
    [("include=cores", "include"), ("include=", "include"), ("dp_rank=1", "dp_rank"),
     ("dp_rank=x", "dp_rank"), ("format=xml", "format")],
)  # fmt: skip
async def test_bad_query_is_named(served: Served, query: str, param: str) -> None:
    async with served.session.get(f"{served.url}/v1/loads?{query}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_older_gateways_find_their_route(served: Served) -> None:
    assert await get(served, "/get_load") == [
        {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 7}
    ]


def in_gb(num_bytes: int) -> Any:
    return pytest.approx(num_bytes / 2**30, abs=1e-3)


def with_graphs(engine: FakeEngine, report: GraphReport, monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(engine.load(), graphs=report)
    monkeypatch.setattr(engine, "load", lambda: load)


async def test_memory_is_told_to_the_megabyte(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, kv, available, graphs = (random.randrange(MB, 10**11) for _ in range(4))
    engine = served.engine
    engine.info = replace(engine.info, weight_bytes=weights, kv_bytes=kv, available_bytes=available)
    with_graphs(engine, GraphReport({}, {}, graphs), monkeypatch)
    memory = (await get(served, "/v1/loads?include=memory"))["loads"][0]["memory"]
    assert memory == {
        "weight_gb": in_gb(weights), "kv_cache_gb": in_gb(kv), "graph_gb": in_gb(graphs),
        "token_capacity": 1000,
    }  # fmt: skip
    (state,) = (await get(served, "/server_info"))["internal_states"]
    assert state["memory_usage"] == {
        "weight": in_gb(weights), "kvcache": in_gb(kv), "startup_available": in_gb(available),
        "graph": {"target": in_gb(graphs)}, "token_capacity": 1000,
    }  # fmt: skip
    async with served.session.get(served.url + "/v1/loads?format=prometheus") as response:
        gauge = memory["graph_gb"]
        assert f'sglang_memory_graph_gb{{dp_rank="0"}} {gauge}\n' in await response.text()


async def test_server_info_tells_how_far_capture_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await get(served, "/server_info")
    assert before["graphs"] == {"captured": {}, "planned": {}}
    report = GraphReport({"decode": (1, 8), "prefill": (64,)}, {"decode": 3, "prefill": 5}, 7)
    with_graphs(served.engine, report, monkeypatch)
    after = await get(served, "/server_info")
    assert after["graphs"] == {
        "captured": {"decode": [1, 8], "prefill": [64]},
        "planned": {"decode": 3, "prefill": 5},
    }
    assert after["internal_states"][0]["decode_cuda_graph_bs"] == [1, 8]


async def test_server_info_tells_what_start_up_took(served: Served) -> None:
    rows = {"imports": 0.71, "weights": 0.56, "other": 0.05}
    served.engine.info = replace(served.engine.info, startup_s=rows)
    info = await get(served, "/server_info")
    assert (info["startup_time"], info["startup_s"]) == (1.32, rows)
