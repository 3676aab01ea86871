"""How a body is captured and replayed: CUDA graphs, host tapes, or not at all.

Knows bodies without arguments only: a body reads and writes fixed buffers, whoever wrote it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from treadle.graphs.arena import Arena
from treadle.kernels import host, tape

Body = Callable[[], None]


class CaptureError(RuntimeError):
    """A body cannot be captured; it still runs eagerly."""


class Graph(Protocol):
    """A captured body."""

    def replay(self) -> None:
        """What the body did, to the same addresses."""


class GraphBackend(Protocol):
    """Makes graphs. Used on the launch thread only."""

    @property
    def name(self) -> str:
        """As log lines call it: `cuda graph`, `cpu graph`."""

    @property
    def needs_warm_up(self) -> bool:
        """Whether a body must have run once before it is captured."""

    def capture(self, body: Body) -> Graph:
        """Raises: CaptureError."""

    def synchronize(self) -> None:
        """Waits for what has been queued; called only where bodies warm up."""

    def num_bytes(self) -> int:
        """Memory that all graphs take."""

    def clear(self) -> None:
        """Called when no graph is left: gives back what they shared."""


class Eager:
    """Runs the body itself, on the same padded buffers."""

    name = "eager"
    needs_warm_up = False

    def capture(self, body: Body) -> Graph:
        return _Running(body)

    def synchronize(self) -> None:
        pass

    def num_bytes(self) -> int:
        return 0

    def clear(self) -> None:
        pass


class _Running:
    def __init__(self, body: Body) -> None:
        self.replay = body


class HostGraphs:
    """Tapes of host kernel calls; recording runs nothing, replaying runs no model code.

    All tapes share one workspace: they run one after the other.
    """

    name = "cpu graph"
    needs_warm_up = False

    def __init__(self, arena: Arena, workspace_bytes: int) -> None:
        """workspace_bytes: address space for what kernels hand to each other. Only what the
        largest tape uses is ever committed.
        """
        self._arena = arena
        self._memory = arena.empty("cuda_graph", (workspace_bytes,), torch.uint8)
        self._workspace = tape.Workspace(self._memory)

    def capture(self, body: Body) -> Graph:
        try:
            return _Tape(host.record(body, self._workspace))
        except tape.NotRecordable as error:
            raise CaptureError(str(error)) from error

    def synchronize(self) -> None:
        pass

    def num_bytes(self) -> int:
        return self._workspace.peak

    def clear(self) -> None:
        self._workspace = tape.Workspace(self._memory)


class _Tape:
    def __init__(self, recorded: tape.Tape) -> None:
        self.replay = recorded.play


class CudaGraphs:
    """CUDA graphs in one shared pool, captured without stopping the device.

    `torch.cuda.graph` would synchronise and empty caches at each use; capture_begin and capture_end
    do neither. Other threads may use the device meanwhile (thread-local mode).
    """

    name = "cuda graph"
    needs_warm_up = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._used = 0

    def capture(self, body: Body) -> Graph:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.mem_get_info(self._device)[0]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                with _ended(graph):
                    body()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._used += max(0, before - torch.cuda.mem_get_info(self._device)[0])
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def num_bytes(self) -> int:
        return self._used

    def clear(self) -> None:
        self._used = 0
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _ended(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Ends a capture also when the body raised: the stream would stay unusable."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
