"""What a request carries besides its prompt and sampling: queueing and sharing. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Names are SGLang's request fields.

    extra_key, cache_salt: requests that differ in either never share cached KV.
    """

    priority: int | None = None
    routing_key: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
