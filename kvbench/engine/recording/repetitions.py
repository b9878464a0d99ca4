"""Work of a generation that is recorded at its second run and then replayed on new inputs."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.engine.recording.host_copies import CapturedCopies

T = TypeVar("T")


class Recording(NamedTuple):
    """Recording of some work by a `GraphRecorder`.

    Attributes:
        inputs: tensors that the work reads, at fixed addresses.
        out: tensor that the work writes.
        repeat: replays the work on the device.
        restore: sets the host's state to what it was after the work.
    """

    inputs: Sequence[Tensor]
    out: Tensor
    repeat: Callable[[], object]
    restore: Callable[[], None]


class Repetitions:
    """Work that is repeated on new inputs of equal shapes, such as the scales of a generation.

    The first time, work runs normally, which compiles its kernels and makes its copies from the host; the second time
    it is recorded, and later the recording is replayed. Work must not synchronise, and tensors other than its inputs
    must stay at their addresses. After a recording that failed, work runs normally.

    Attributes:
        recording: whether work is being recorded.
        by_launches: whether work on the last value of `hold` runs by launches, which need ordinary memory.

    Args:
        record: recorder of work.
        save: saves the host's state that the work changes, and returns a function that restores it.
    """

    def __init__(self, record: GraphRecorder, save: Callable[[], Callable[[], None]]) -> None:
        self._record, self._save = record, save
        self.recording, self.by_launches = False, True
        self._failed = False  # whether a recording failed
        self._alone = False  # whether memory suffices only for recordings of one held value
        self._drop()

    @property
    def holds_memory(self) -> bool:
        """Whether recordings may hold memory that work without them does not need."""
        return any(times > 1 for times in self._times.values())

    def _drop(self) -> None:
        self._held: dict[Hashable, Any] = {}
        self._times: dict[Hashable, int] = {}  # calls of `hold` by value
        self._copies: dict[Hashable, CapturedCopies] = {}
        self._recorded: dict[Hashable, Recording] = {}

    def clear(self) -> None:
        """Drop all recordings, after tensors that they read have moved."""
        held = self._recorded or self.holds_memory
        self._drop()
        if held:
            self._record.clear()

    def forget(self) -> None:
        """Forget all work after memory ran out; if recordings held memory, keep those of one held value from now on."""
        self._alone |= self.holds_memory
        self.clear()

    def hold(self, value: T) -> T:
        """Copy a value's tensors into the first value with equal shapes and dtypes, and return that one."""
        self.by_launches = True
        if self._failed:
            return value
        tensors = [*list_tensors(value)]
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if self._alone and key not in self._held and self.holds_memory:
            self.clear()
            self._record.make_room()
        first: T = self._held.setdefault(key, value)
        if first is not value:
            torch._foreach_copy_([*list_tensors(first)], tensors)
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] == 2:
            self._record.make_room()
        self.by_launches = self._times[key] == 1
        return first

    def run(self, key: Hashable, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `work(*inputs)`; once recorded, the next repetition overwrites the result.

        `key` identifies the work and all that it depends on beside inputs, which have equal shapes at every call.
        """
        if self._failed:
            return work(*inputs)
        if key not in self._copies:
            copies = CapturedCopies()
            with copies.note():
                out = work(*inputs)
            self._copies[key] = copies
            return out
        if key not in self._recorded:
            self._recorded[key] = self._make_recording(self._copies[key], work, inputs)
            return self._recorded[key].out
        recording = self._recorded[key]
        for held, tensor in zip(recording.inputs, inputs, strict=True):
            held.copy_(tensor)
        recording.restore()
        recording.repeat()
        return recording.out

    def _make_recording(
        self, copies: CapturedCopies, work: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> Recording:
        """Record work and replay it once."""
        held = [tensor.clone() for tensor in inputs]

        def repeatable() -> Tensor:
            with copies.reuse():
                return work(*held)

        self.recording = True
        try:
            out, repeat = self._record(repeatable)
            repeat()  # the first replay may need memory
        except BaseException:
            self._failed = True
            raise
        finally:
            self.recording = False
        return Recording(held, out, repeat, self._save())


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
