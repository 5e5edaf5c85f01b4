"""CUDA graphs: capture what a function launches on a stream, replay it with one call.

PyCUDA has no graphs; cuda-bindings captures PyCUDA's stream. Nothing that is captured may allocate, synchronise or
touch another stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.cuda.errors import check

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from engine.cuda.context import DeviceContext


class Graph:
    """An instantiated graph, already uploaded. `num_nodes`: kernels and copies in it."""

    def __init__(self, context: DeviceContext, executable: Any, num_nodes: int) -> None:
        self._api = context.api
        self._executable = executable
        self.num_nodes = num_nodes

    def launch(self, stream: Any) -> None:
        """Queue the whole graph on a PyCUDA stream."""
        check(self._api.cuGraphLaunch(self._executable, stream.handle), "cuGraphLaunch")

    def destroy(self) -> None:
        if self._executable is not None:
            executable, self._executable = self._executable, None
            check(self._api.cuGraphExecDestroy(executable), "cuGraphExecDestroy")


def capture(context: DeviceContext, stream: Any, record: Callable[[], None]) -> Graph:
    """Call `record`, which launches on `stream`; return what it launched as a graph. Nothing runs now.

    The stream must be idle or ordered after what the graph needs at its launch, not at its capture. Errors inside
    `record` end the capture and are raised.
    """
    api = context.api
    mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(api.cuStreamBeginCapture(stream.handle, mode), "cuStreamBeginCapture")
    try:
        record()
    except BaseException:
        unfinished = api.cuStreamEndCapture(stream.handle)  # its own error would hide the one that matters
        if int(unfinished[0]) == 0 and unfinished[1] is not None:
            api.cuGraphDestroy(unfinished[1])
        raise
    graph = check(api.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
    try:
        num_nodes = int(check(api.cuGraphGetNodes(graph), "cuGraphGetNodes")[1])
        executable = check(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    finally:
        check(api.cuGraphDestroy(graph), "cuGraphDestroy")
    check(api.cuGraphUpload(executable, stream.handle), "cuGraphUpload")
    return Graph(context, executable, num_nodes)


class GraphCache:
    """Graphs by key (a batch bucket), captured on one stream when first asked for. Closed with the context."""

    def __init__(self, context: DeviceContext, stream: Any) -> None:
        self._context, self._stream = context, stream
        self._graphs: dict[Hashable, Graph] = {}
        context.on_close("graphs", self.clear)

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable) -> Graph | None:
        return self._graphs.get(key)

    def add(self, key: Hashable, record: Callable[[], None]) -> Graph:
        """Capture `record` under `key`, replacing what was there."""
        graph = capture(self._context, self._stream, record)
        if (old := self._graphs.pop(key, None)) is not None:
            old.destroy()
        self._graphs[key] = graph
        return graph

    def clear(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].destroy()
