"""One line per answered request, as uvicorn words it. Knows no route."""

from __future__ import annotations

import logging
import sys
from http import HTTPStatus

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

access_logger = logging.getLogger("treadle.access")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class AccessLogger(AbstractAccessLogger):
    @property
    def enabled(self) -> bool:
        return access_logger.isEnabledFor(logging.INFO)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        peer = request.transport.get_extra_info("peername") if request.transport else None
        where = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "-"
        status = response.status
        access_logger.info(
            '%s - "%s %s HTTP/%d.%d" %d %s',
            where, request.method, request.path_qs, *request.version,
            status, _PHRASES.get(status, ""),
        )  # fmt: skip


def show_access_lines() -> None:
    """Prints the lines to standard output as `INFO:     ip:port - "GET / HTTP/1.1" 200 OK`."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
    access_logger.handlers = [handler]
    access_logger.propagate = False
    access_logger.setLevel(logging.INFO)
