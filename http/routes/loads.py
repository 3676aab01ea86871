"""`/v1/loads` and `/get_load`: how busy the engine is, for gateways. Makes no token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from treadle.engine.errors import InvalidRequest
from treadle.engine.info import EngineInfo, EngineLoad
from treadle.engine.memory import GB
from treadle.engine.show import show
from treadle.http.body import json_response
from treadle.http.served import ServedEngine
from treadle.http.state import STATE

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
FORMATS = ("json", "prometheus")

routes = web.RouteTableDef()


@routes.get("/v1/loads")
async def loads(request: web.Request) -> web.Response:
    engine, query = request.app[STATE].need_engine(), request.query
    sections = query.get("include", "all").split(",")
    for section in sections:
        _check("include", section, SECTIONS)
    _check("dp_rank", query.get("dp_rank", "0"), ("0",))
    form = query.get("format", "json")
    _check("format", form, FORMATS)
    load = _load(engine, sections)
    if form == "prometheus":
        lines = "".join(_gauges("sglang", load))
        return web.Response(text=lines, content_type="text/plain")
    now = datetime.now(UTC).isoformat()
    return json_response(
        {
            "timestamp": now,
            "version": engine.info.version,
            "accelerator": engine.info.server_args.get("device"),
            "num_accelerators": 1,
            "loads": [{"timestamp": now, **load}],
        }
    )


@routes.get("/get_load")
async def get_load(request: web.Request) -> web.Response:
    load = request.app[STATE].need_engine().load()
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": load.num_running_reqs + load.num_waiting_reqs,
                "num_waiting_reqs": load.num_waiting_reqs,
                "num_tokens": load.num_total_tokens,
            }
        ]
    )


def _check(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise InvalidRequest(f"{name} must be one of {', '.join(legal)}, got {show(value)}", name)


def _load(engine: ServedEngine, sections: list[str]) -> dict[str, Any]:
    """The core is always there; sections about what this engine does not do never are."""
    found = engine.load()
    core = asdict(found)
    del core["graphs"]
    core["gen_throughput"] = core.pop("last_gen_throughput")
    load = {
        "dp_rank": 0,
        **core,
        "max_running_requests": engine.info.server_args.get("max_running_requests"),
        "token_usage": found.num_used_tokens / max(found.max_total_num_tokens, 1),
    }
    if {"memory", "all"} & set(sections):
        load["memory"] = _memory(engine.info, found)
    if {"queues", "all"} & set(sections):
        load["queues"] = {"waiting": found.num_waiting_reqs}
    return load


def _memory(info: EngineInfo, load: EngineLoad) -> dict[str, Any]:
    return {
        "weight_gb": in_gb(info.weight_bytes),
        "kv_cache_gb": in_gb(info.kv_bytes),
        "graph_gb": in_gb(load.graphs.num_bytes),
        "token_capacity": load.max_total_num_tokens,
    }


def in_gb(num_bytes: int) -> float:
    """To the megabyte: a small model's graphs take few."""
    return round(num_bytes / GB, 3)


def _gauges(prefix: str, values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}_{key}"
        if isinstance(value, dict):
            yield from _gauges(name, value)
        elif isinstance(value, int | float) and key != "dp_rank":
            yield f'# TYPE {name} gauge\n{name}{{dp_rank="0"}} {value}\n'
