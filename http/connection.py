"""One client's connection: errors of the protocol itself get the JSON body too.

Knows no route.
"""

from __future__ import annotations

from aiohttp import web

from treadle.http.errors import describe, error_response


class Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that never reached a route; closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        if status < 500:
            reason = " ".join((message or "malformed").split())
            response = error_response(status, f"this is no valid HTTP request: {reason}")
        else:
            error = exc if isinstance(exc, Exception) else RuntimeError(message)
            response = error_response(*describe(error))
        response.force_close()
        return response
