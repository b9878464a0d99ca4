"""Copies from the host to a device inside repeated work: made once, then reused on the device."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("to", "_to_copy", "copy_")
"""Operations of torch that may copy from the host to a device."""


class CapturedCopies:
    """Tensors that recorded work copies from the host to a device, in order.

    A graph may not contain a copy from pageable memory, and one from pinned memory would read it again at each replay.
    The work makes its copies once; afterwards it gets the same tensors, which it must not write to.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor]] = []  # the source on the host and its copy on the device

    def note(self) -> AbstractContextManager[object]:
        """Return a context in which copies are made and kept."""

        def keep(source: Tensor, copy: Callable[[], Tensor]) -> Tensor:
            self._made.append((source.clone(), copy()))
            return self._made[-1][1]

        return _CopyMode(keep)

    def reuse(self) -> AbstractContextManager[object]:
        """Return a context in which the same work gets the kept tensors.

        The context raises RuntimeError if the work copies different values than before.
        """
        left = iter(self._made)

        def find(source: Tensor, _: Callable[[], Tensor]) -> Tensor:
            before, made = next(left, (None, source))
            if before is None or not are_same(before, source):
                raise RuntimeError(
                    "recorded work copied different values from the host than before; its method must name this in "
                    "`graph_obstacle`"
                )
            return made

        return _CopyMode(find)


def are_same(before: Tensor, now: Tensor) -> bool:
    """Return whether two tensors on the host are equal in dtype, shape and values."""
    return before.dtype == now.dtype and torch.equal(before, now)


class _CopyMode(TorchDispatchMode):
    """Dispatch mode that replaces each copy from the host by `answer(source, function that copies)`."""

    def __init__(self, answer: Callable[[Tensor, Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in COPIES:
            return func(*args, **kwargs)
        into = name == "copy_"
        source = args[1] if into else args[0]
        target = args[0].device if into else _find_device((*args[1:], *kwargs.values()))
        if target is None or target.type == "cpu" or source.device.type != "cpu":
            return func(*args, **kwargs)
        if into:
            return func(args[0], self._answer(source, lambda: source.to(target)), *args[2:], **kwargs)
        return self._answer(source, lambda: func(*args, **kwargs))


def _find_device(values: Iterable[object]) -> torch.device | None:
    """Return the target device of a conversion, given directly or by a tensor; None if it names none."""
    for value in values:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, Tensor):
            return value.device
    return None
