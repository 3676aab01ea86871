"""The error family that callers of the engine may handle. Knows no transport."""

from __future__ import annotations


class TreadleError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(TreadleError):
    """A start-up setting cannot work; the message names the flag and what would."""


class ModelError(TreadleError):
    """A checkpoint, config or tokenizer cannot be used; the message names the file or tensor."""


class InvalidRequest(TreadleError):
    """What a caller sent is not legal.

    param: the field's path as the caller wrote it (`sampling_params.top_p`), or None.
    code: a short machine-readable word, or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotBuilt(InvalidRequest):
    """A legal value of a known field that this version cannot honour yet."""

    def __init__(self, param: str, detail: str = "") -> None:
        message = f"{param} is not supported yet{': ' + detail if detail else ''}"
        super().__init__(message, param, "unsupported_parameter")


class EngineClosed(TreadleError):
    """The engine is shutting down or lost its device; no new work is taken."""


class QueueFull(TreadleError):
    """`--max-queued-requests` requests wait already; the caller may try again later."""


class NotIdle(TreadleError):
    """Something still runs or waits, and what was asked for needs an idle engine."""
