"""CUDA graphs: work that is recorded once and replayed."""

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class GraphRecorder(Protocol):
    """Recorder of a callable's device operations, which are not executed; host values become constants."""

    def __call__(self, work: Callable[[], Tensor], /) -> tuple[Tensor, Callable[[], object]]:
        """Return the output tensor of the work, and a function that repeats the work.

        Each call of the function computes the output anew from the current contents of the input tensors.
        """

    def make_room(self) -> None:
        """Make the allocator's unused memory available to recordings; called before a batch is first recorded."""

    def clear(self) -> None:
        """Free the memory of all recordings once nothing else holds it."""


class Repeat(Protocol):
    """Function that runs a one-token step of a segment."""

    def __call__(self, key: Hashable, step: Callable[..., Tensor], /, *inputs: Tensor) -> Tensor:
        """Return `step(*inputs)`; for arguments see `Repetitions.run`."""


class CudaGraphs:
    """CUDA graphs on the current device, in one memory pool.

    A graph may reuse the memory of earlier graphs' tensors unless something still holds them: replay graphs in the
    order of their recording, or replay only one.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        _hold_generator(torch.cuda.current_device())

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record work that never synchronises and has run before, so that its kernels are compiled."""
        graph, stream = torch.cuda.CUDAGraph(), _find_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        # `torch.cuda.graph` would first return the allocator's free memory to the device, at every segment.
        with torch.cuda.stream(stream):
            graph.capture_begin(None if self._graph is None else self._graph.pool(), "thread_local")
            try:
                out = work()
            except BaseException:
                with suppress(RuntimeError):  # ending a capture that the error broke fails too
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph  # the pool lives as long as one of its graphs
        return out, graph.replay

    def make_room(self) -> None:
        """Return the allocator's unused memory to the device: the pool of the graphs cannot take it."""
        torch.cuda.empty_cache()

    def clear(self) -> None:
        """Release the graphs' memory pool."""
        self._graph = None


@cache
def _hold_generator(device: int) -> torch.cuda.CUDAGraph:
    """Keep the tensors through which graphs read a device's generator for the life of the process.

    Otherwise torch allocates them at the first capture. If memory runs out there, the destructor of that graph ends the
    process (torch 2.11), although a smaller batch might fit.
    """
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(torch.cuda.default_generators[device])
    return graph


@cache
def _find_stream(device: int) -> torch.cuda.Stream:
    """Return the only stream on which a device captures: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)
