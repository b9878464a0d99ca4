"""CUDA graphs: a step that is recorded once and replayed."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class GraphRecorder(Protocol):
    """Records the device operations of some work without executing them; host values become constants."""

    def __call__(self, work: Callable[[], Tensor], /) -> tuple[Tensor, Callable[[], object]]:
        """Return the output tensor of the work, and a function that repeats the work.

        Each call overwrites the output, computed from the current contents of the input tensors.
        """

    def clear(self) -> None:
        """Free the memory of the recordings once nothing else holds it."""


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
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph  # the pool lives as long as a graph of it does
        return out, graph.replay

    def clear(self) -> None:
        """Release the pool."""
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
    """Return the one stream that a device captures on: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


class Recording(NamedTuple):
    """Recorded work.

    Attributes:
        inputs: tensors that the work reads, at fixed addresses.
        out: tensor that the work writes.
        repeat: repeats the work.
        restore: restores the host's state after the work.
    """

    inputs: Sequence[Tensor]
    out: Tensor
    repeat: Callable[[], object]
    restore: Callable[[], None]


class Repetitions:
    """Work that is repeated on new inputs of the same shapes, such as the scales of a generation.

    The first time, work runs normally, which compiles its kernels; the second time it is recorded, and later the
    recording is replayed. Work must not synchronise, and tensors other than its inputs must stay at their addresses.

    Args:
        record: records work.
        save: saves the host's state that the work changes; returns a function that restores it.
    """

    def __init__(self, record: GraphRecorder, save: Callable[[], Callable[[], None]]) -> None:
        self._record, self._save = record, save
        self.clear()

    def clear(self) -> None:
        """Forget all work, after tensors that it reads have moved."""
        self._held: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recording] = {}

    def hold(self, value: T) -> T:
        """Copy tensors into the first value of the same shapes, and return that value."""
        tensors = [*list_tensors(value)]
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        first: T = self._held.setdefault(key, value)
        if first is not value:
            torch._foreach_copy_([*list_tensors(first)], tensors)
        return first

    def run(self, key: Hashable, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `work(*inputs)`; once recorded, the next repetition overwrites the result.

        `key` identifies the work and everything else that it depends on. Inputs have the same shapes at every call.
        """
        if key not in self._seen:
            self._seen.add(key)
            return work(*inputs)
        if key not in self._recorded:
            places = [tensor.clone() for tensor in inputs]
            out, repeat = self._record(lambda: work(*places))
            self._recorded[key] = Recording(places, out, repeat, self._save())
        else:
            recording = self._recorded[key]
            for place, tensor in zip(recording.inputs, inputs, strict=True):
                place.copy_(tensor)
            recording.restore()
        self._recorded[key].repeat()
        return self._recorded[key].out


def list_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a value made of tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from list_tensors(part)
    elif is_dataclass(value):
        for part in fields(value):
            yield from list_tensors(getattr(value, part.name))
