"""Every error as one JSON body: `{"error": {"message", "type", "param", "code"}}`.

Knows statuses and the engine's error family, no route.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from treadle.engine.errors import EngineClosed, InvalidRequest, NotIdle, QueueFull

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
GENERIC = "the server failed to answer this request; its log says why"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotFound(Exception):
    """What the client named does not exist.

    param: the field's path as the client wrote it, or None. code: a machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class Failed(Exception):
    """The engine ended a request for a reason of its own; status as in HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_object(
    status: int, message: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """The JSON body of an error. Lone surrogates that headers or paths smuggle in become `?`."""
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    error = {
        "message": _clean(message),
        "type": _TYPES.get(status, fallback),
        "param": param if param is None else _clean(param),
        "code": code,
    }
    return orjson.dumps({"error": error})


def error_response(
    status: int, message: str, param: str | None = None, code: str | int | None = None
) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return web.Response(
        body=error_object(status, message, param, code),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def describe(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Status, message, param and code of an error; one that nobody expected is logged."""
    match error:
        case InvalidRequest():
            return 400, error.message, error.param, error.code
        case NotFound():
            return 404, error.message, error.param, error.code
        case EngineClosed():
            return 503, str(error), None, None
        case QueueFull():
            return 503, str(error), None, "queue_full"
        case NotIdle():
            return 400, str(error), None, "not_idle"
        case Failed():
            return error.status, str(error), None, None
        case web.RequestPayloadError():
            return 400, "the body ends early or is not encoded as its headers say", None, None
        case _:
            logger.error("A request failed", exc_info=error)
            return 500, GENERIC, None, None


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a route or the framework raises into the one body."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _from_framework(request, error)
    except ConnectionError:
        raise
    except Exception as error:
        return error_response(*describe(error))


def _from_framework(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        response = error_response(error.status, message)
        response.headers["Allow"] = allowed
        return response
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_response(error.status, f"the body is too large: {error.text}")
    if error.status == 404:
        return error_response(404, f"there is no {request.path} here")
    return error_response(error.status, error.text or error.reason)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
