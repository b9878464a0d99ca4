"""CUDA graphs: a step that is recorded once and replayed."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Record(Protocol):
    """Records what some work asks of the device, without it being done.

    Numbers that the work reads on the host are part of the record.
    """

    def __call__(self, work: Callable[[], Tensor], /) -> tuple[Tensor, Callable[[], object]]:
        """Return the tensor that the work returns, and what does the work.

        Each call of the latter writes that tensor anew, out of the tensors that the work has read, as they are then.
        """

    def clear(self) -> None:
        """Let go of the memory of what was recorded, once nothing else holds it."""


class CudaGraphs:
    """CUDA graphs on the current device. All take their memory from one pool.

    Tensors of one graph are reused by those recorded after it, unless something still holds them: graphs are to be
    repeated in the order in which they were recorded, or one of them alone.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        _hold_generator(torch.cuda.current_device())

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record work that waits for nothing and has run before, so that its kernels are compiled (`Record`)."""
        graph, stream = torch.cuda.CUDAGraph(), _find_stream(torch.cuda.current_device())
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

    def clear(self) -> None:
        """Let go of the pool."""
        self._graph = None


@cache
def _hold_generator(device: int) -> torch.cuda.CUDAGraph:
    """Keep the tensors by which graphs read a device's generator, as long as the process lives.

    Else torch allocates them when the first capture begins. If memory runs out just then, the destructor of that graph
    finds itself unregistered and ends the process (seen with torch 2.11), where a smaller batch might have fitted.
    """
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(torch.cuda.default_generators[device])
    return graph


@cache
def _find_stream(device: int) -> torch.cuda.Stream:
    """Return the stream that a device captures on: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


class Recording(NamedTuple):
    """Work that was recorded.

    Attributes:
        inputs: tensors that it reads, which stay where they are.
        out: what it writes.
        repeat: does it again.
        restore: brings the host's bookkeeping to where it was after the work.
    """

    inputs: Sequence[Tensor]
    out: Tensor
    repeat: Callable[[], object]
    restore: Callable[[], None]


class Repetitions:
    """Pieces of work that come again and again on other numbers of the same shapes, such as the scales of a generation.

    The first time a piece runs as it is, which compiles its kernels; the second time it is recorded, and repeated from
    then on. Work must not wait for the device, and what it reads beside its inputs must stay where it is.

    Args:
        record: records a piece.
        save: notes the host's bookkeeping that the work changes, and returns what restores it.
    """

    def __init__(self, record: Record, save: Callable[[], Callable[[], None]]) -> None:
        self._record, self._save = record, save
        self.clear()

    def clear(self) -> None:
        """Forget all work: what it reads is no longer where it was."""
        self._held: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recording] = {}

    def hold(self, value: T) -> T:
        """Return the value with its tensors where those of the first value of the same shapes are."""
        tensors = [*list_tensors(value)]
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        held: T = self._held.setdefault(key, value)
        if held is not value:
            torch._foreach_copy_([*list_tensors(held)], tensors)
        return held

    def run(self, key: Hashable, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return what `work` makes of the inputs; once recorded, a tensor that the next repetition overwrites.

        Args:
            key: says which piece of work it is, and on what beside the inputs.
            work: maps the inputs to a tensor.
            inputs: tensors of the same shapes at every call.
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
