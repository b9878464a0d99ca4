"""Recorder that replays operations on a CPU as CUDA graphs do on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.device_watch import list_tensors
from kvbench.kernels.products import MATMUL_SETTINGS


class Tape(TorchDispatchMode):
    """Stand-in on a CPU for CUDA graphs: Python runs once, then its operations are repeated on the same tensors.

    Like a capture, recording has no effect on the tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.repeated = self.cleared = self.made_room = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record work; a read of a scalar by the host is an error, as on a GPU (`GraphRecorder`)."""
        self._done: list[tuple[Any, Any, Any, list[tuple[int, Tensor]], str]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        with self:
            out = work()
        for written, values in reversed(self._before):
            written.copy_(values)
        self.recorded += 1
        done = self._done

        def repeat() -> None:
            self.repeated += 1
            before = current = MATMUL_SETTINGS.fp32_precision
            for func, args, kwargs, made, precision in done:
                if precision != current:  # a graph repeats the kernels that it recorded
                    MATMUL_SETTINGS.fp32_precision = current = precision
                results = list_tensors(func(*args, **kwargs))
                for place, held in made:
                    held.copy_(results[place])
            MATMUL_SETTINGS.fp32_precision = before

        return out, repeat

    def make_room(self) -> None:
        """Count a request to return unused memory to the device."""
        self.made_room += 1

    def clear(self) -> None:
        """Count a request to release the recordings' memory."""
        self.cleared += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a host read was recorded")
        values = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = list_tensors((values, kwargs.get("out")))
        self._before += [(tensor, tensor.clone()) for tensor in written]
        out = func(*args, **kwargs)
        given = set(map(_storage_of, list_tensors((args, kwargs))))
        results = list_tensors(out)
        made = [(place, result) for place, result in enumerate(results) if _storage_of(result) not in given]
        if written or made or not results:  # others make views, for which a graph launches nothing
            self._done.append((func, args, kwargs, made, MATMUL_SETTINGS.fp32_precision))
        return out


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
