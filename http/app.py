"""The application: routes, limits and the one form of errors. Knows no socket."""

from __future__ import annotations

from aiohttp import web

from treadle.http.errors import errors_as_json
from treadle.http.routes import cache, chat, completions, health, loads, memory, models, native
from treadle.http.state import STATE, ServerState


def create_app(state: ServerState) -> web.Application:
    """state: its engine may come later; until then what needs one answers 503."""
    app = web.Application(
        middlewares=[errors_as_json], client_max_size=state.settings.max_body_bytes
    )
    app[STATE] = state
    for module in (cache, chat, completions, health, loads, memory, models, native):
        app.add_routes(module.routes)
    return app
