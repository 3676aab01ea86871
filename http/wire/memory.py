"""What the memory routes take. Knows no route; which tags there are is the engine's business."""

from __future__ import annotations

from treadle.http.wire.base import Strs, Wire


class MemoryRequest(Wire):
    tags: Strs | None = None  # none: all memory that can be released
