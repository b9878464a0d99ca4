"""Observer of torch's operations on a device without data."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DeviceWatch(TorchDispatchMode):
    """Observer of operations as they run, composite ones as their parts; scalars that the host reads are 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note_read(args[0])
            return 1
        if func is not torch.ops.prim.device.default:
            with self:  # otherwise composite operations would arrive undivided
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        self.note_inputs(list_tensors((args, kwargs)))
        out = func(*args, **kwargs)
        self.note_operation(func, args, kwargs, list_tensors(out))
        return out

    def note_read(self, scalar: Tensor) -> None:
        """Handle a read of a device scalar by the host."""

    def note_inputs(self, tensors: list[Tensor]) -> None:
        """Handle the inputs of an operation before it runs."""

    def note_operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]
    ) -> None:
        """Handle a finished operation of torch."""


def list_tensors(values: object) -> list[Tensor]:
    """Return the tensors inside nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = [*values.values()]
    if not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in list_tensors(value)]
