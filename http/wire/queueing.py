"""The fields that say how a request queues and with whom it shares cached prefixes.

Knows no API in particular. A key is one for all prompts or a list with one for each.
"""

from __future__ import annotations

from typing import Annotated

from treadle.engine.errors import InvalidRequest
from treadle.engine.options import RequestOptions
from treadle.engine.sampling_params import INT64
from treadle.http.wire.base import FastList, Key, Wire, between

Keys = Key | FastList[Key | None]
Priority = Annotated[int, between(-INT64, INT64 - 1)]


class QueueFields(Wire):
    priority: Priority | None = None
    extra_key: Keys | None = None
    cache_salt: Keys | None = None

    def request_options(self, count: int, routing_key: str | None) -> list[RequestOptions]:
        """One per prompt.

        Raises: InvalidRequest for a list of another length.
        """
        extra_keys = _one_each(self.extra_key, count, "extra_key")
        salts = _one_each(self.cache_salt, count, "cache_salt")
        return [
            RequestOptions(self.priority, routing_key, extra_key or None, salt or None)
            for extra_key, salt in zip(extra_keys, salts, strict=True)
        ]


def _one_each(keys: Keys | None, count: int, name: str) -> list[str | None]:
    if not isinstance(keys, list):
        return [keys] * count
    if len(keys) != count:
        raise InvalidRequest(
            f"{name} must be one string or one for each of the {count} prompts, got {len(keys)}",
            name,
        )
    return keys
