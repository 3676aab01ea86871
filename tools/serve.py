"""`treadle serve`: one process that owns its event loop, its garbage collector and its port.

Knows the server and the engine; every setting comes in as options.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
from collections.abc import Mapping
from typing import Any

from treadle.engine import Engine
from treadle.engine.config import EngineConfig
from treadle.engine.interpreter import own_interpreter
from treadle.http.server import ServerSettings, run
from treadle.http.server import serve as serve_http
from treadle.http.state import ApiSettings, ServerState
from treadle.tools.startup import own_process

logger = logging.getLogger("treadle")

LOST_GRACE_S = 3.0  # for the threads of a lost device to end


def serve(options: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    """Serves until a signal and returns 0, or 1 when the device was lost on the way.

    A process whose ranks belong to an engine served elsewhere runs them until that engine ends.
    """
    config = EngineConfig.from_flags(flags)
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun
    if config.parallel.node_rank or (is_launched and os.environ["RANK"] != "0"):
        from treadle.tools.parallel import follow

        return follow(config)
    own_interpreter()
    return run(_serve(options, flags))


async def _serve(options: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    startup = own_process()
    state = ServerState(
        ApiSettings(
            enable_cache_report=options.enable_cache_report,
            incremental_streaming_output=options.incremental_streaming_output,
        )
    )
    settings = ServerSettings(options.host, options.port, options.shutdown_timeout)
    engines: list[Engine] = []

    async def start() -> Engine:
        engine = await Engine.create(**flags)
        engines.append(engine)
        return engine

    def on_ready(port: int) -> None:
        _ready(options.host, port)
        for engine in engines:
            engine.info = startup.finish(engine.info)
        logger.info("The server is fired up and ready to roll!")

    try:
        await serve_http(start, state, settings, on_ready)
        if not engines:  # a thread that loads cannot be stopped
            _leave(0, "Stopped before the model was loaded")
    finally:
        for engine in engines:
            await _end(engine)
    return 1 if any(engine.lost.is_set() for engine in engines) else 0


async def _end(engine: Engine) -> None:
    """Shuts down. Threads that wait for a lost device may wait forever: they are left behind."""
    patience = LOST_GRACE_S if engine.lost.is_set() else None
    try:
        await asyncio.wait_for(engine.shutdown(), patience)
    except TimeoutError:
        _leave(1, "The device does not answer; leaving without it")


def _leave(code: int, why: str) -> None:
    """Ends the process without waiting for its threads."""
    logger.info("%s", why)
    logging.shutdown()
    os._exit(code)


def _ready(host: str, port: int) -> None:
    gc.collect()
    gc.freeze()  # what is alive now stays: a full collection would stop the loop to look at it
    shown = f"[{host}]" if ":" in host else host
    logger.info("Listening on http://%s:%d", shown, port)
