"""`/v1/models` and what the server says about model and settings. Makes no token."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from treadle.engine.info import EngineInfo, EngineLoad
from treadle.http.body import json_response
from treadle.http.errors import NotFound
from treadle.http.routes.loads import in_gb
from treadle.http.served import ServedEngine
from treadle.http.state import STATE

routes = web.RouteTableDef()


def check_model(engine: ServedEngine, model: str | None) -> None:
    """A request may leave the model out.

    Raises: NotFound that lists the served names.
    """
    served = engine.info.served_model_name
    if model is not None and model != served:
        shown = model if len(model) <= 100 else model[:97] + "..."
        raise NotFound(
            f"the model {shown!r} is not served here; served: {served!r}",
            "model",
            "model_not_found",
        )


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_card(request.app[STATE].need_engine())]})


@routes.get("/v1/models/{model:.+}")
async def model(request: web.Request) -> web.Response:
    engine = request.app[STATE].need_engine()
    check_model(engine, request.match_info["model"])
    return json_response(_card(engine))


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    info = state.need_engine().info
    return json_response(
        {
            "model_path": info.model_path,
            "served_model_name": info.served_model_name,
            "tokenizer_path": info.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": state.settings.weight_version,
            "load_format": info.server_args.get("load_format"),
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": info.model_type,
            "architectures": info.architectures,
        }
    )


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.need_engine()
    info, load, settings = engine.info, engine.load(), state.settings
    return json_response(
        {
            # one device of each kind; the resolved settings overrule
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "disaggregation_mode": "null",
            **info.server_args,
            "model_path": info.model_path,
            "served_model_name": info.served_model_name,
            "weight_version": settings.weight_version,
            "enable_cache_report": settings.enable_cache_report,
            "incremental_streaming_output": settings.incremental_streaming_output,
            "status": "ready" if state.is_ready else "shutting down",
            "max_total_num_tokens": load.max_total_num_tokens,
            "max_req_input_len": info.max_model_len - 1,
            "version": info.version,
            "frontend": "python",
            "startup_time": info.startup_time,
            "startup_s": info.startup_s,
            "graphs": {"captured": load.graphs.captured, "planned": load.graphs.planned},
            "internal_states": [
                {
                    **info.server_args,
                    "last_gen_throughput": load.last_gen_throughput,
                    "num_running_reqs": load.num_running_reqs,
                    "num_waiting_reqs": load.num_waiting_reqs,
                    "num_used_tokens": load.num_used_tokens,
                    "decode_cuda_graph_bs": load.graphs.captured.get("decode", ()),
                    "memory_usage": _memory_usage(info, load),
                }
            ],
        }
    )


def _memory_usage(info: EngineInfo, load: EngineLoad) -> dict[str, Any]:
    """GB, to the megabyte."""
    return {
        "weight": in_gb(info.weight_bytes),
        "kvcache": in_gb(info.kv_bytes),
        "startup_available": in_gb(info.available_bytes),
        "graph": {"target": in_gb(load.graphs.num_bytes)},  # decode and prefill share it
        "token_capacity": load.max_total_num_tokens,
    }


def _card(engine: ServedEngine) -> dict[str, Any]:
    info = engine.info
    return {
        "id": info.served_model_name,
        "object": "model",
        "created": info.created,
        "owned_by": "sglang",  # its gateway recognises workers that it can drive by this word
        "root": info.model_path,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
