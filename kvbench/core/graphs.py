"""Work that a device is asked for once and repeats: CUDA graphs."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Record(Protocol):
    """Records work on a device. Whatever numbers the work reads on the host are part of the record."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record what `work` asks of the device, without it being done.

        Returns:
            The tensor that `work` returns, and what does the work: each call writes that tensor anew, out of the
            tensors that `work` has read, as they are then.
        """
        ...


class CudaGraphs:
    """CUDA graphs on the current device, one after the other: recording ends the use of the one before.

    All take their memory from one pool, whose tensors are reused from graph to graph.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record work that waits for nothing and has run before, so that its kernels are compiled (`Record`)."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # `torch.cuda.graph` would give the allocator's free memory back to the device first, at every segment.
        with torch.cuda.stream(stream):
            graph.capture_begin(None if self._graph is None else self._graph.pool(), "thread_local")
            try:
                out = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph  # the pool lives as long as a graph of it does
        return out, graph.replay
