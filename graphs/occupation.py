"""Giving a device's memory back to the system, and taking it again.

Knows what lies under which tag; never a step or a request. Called on the launch thread, in order
with the steps. Addresses stay, so captured graphs outlive a release of weights or KV.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from treadle.graphs.arena import Arena
from treadle.graphs.capture import BackgroundCapture
from treadle.graphs.runner import Runner
from treadle.graphs.step import MemoryTag


class Occupation:
    """Weights come back from where they came from, KV comes back empty, graphs are made again."""

    def __init__(
        self,
        arena: Arena,
        runner: Runner,
        capture: BackgroundCapture,
        reload_weights: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._runner = runner
        self._capture = capture
        self._reload_weights = reload_weights

    def release(self, tags: Collection[MemoryTag]) -> None:
        """Raises: RuntimeError when this memory cannot be given back."""
        for tag in tags:
            self._arena.release(tag)
        if "cuda_graph" in tags:
            self._capture.stop()
            self._runner.graphs.clear()

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Raises: RuntimeError, CheckpointError."""
        for tag in tags:
            self._arena.resume(tag)
        if "kv_cache" in tags:
            self._runner.reset()
        if "weights" in tags:
            self._reload_weights()
        if "cuda_graph" in tags:
            self._capture.start()
