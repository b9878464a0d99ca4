"""Where Triton programs run in tests: on a GPU if there is one, else in Triton's interpreter on CPU tensors."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks.support.cuda_branches import on_cuda_branches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = importlib.util.find_spec("triton") is not None

if HERE:
    import triton
    import triton.language as tl
    from triton.runtime.jit import KernelInterface

    LAUNCH = KernelInterface.__getitem__

    @triton.jit
    def _count(number, out):
        for index in tl.range(0, tl.load(number)):
            tl.store(out, index)


def _reads_bounds() -> bool:
    """Whether a loop up to a loaded number runs; the interpreter of old versions breaks on it with NumPy 2.4."""
    try:
        _count[(1,)](torch.ones(1, dtype=torch.int32, device=DEVICE), torch.empty(1, device=DEVICE))
    except Exception as error:
        if "Python scalars" not in str(error):
            raise
        return False
    return True


needs_triton = pytest.mark.skipif(not HERE, reason="Triton is not installed")
needs_loops = pytest.mark.skipif(
    not HERE or not _reads_bounds(),
    reason="Triton is not installed, or its interpreter is too old for this NumPy",
)


def on_device() -> AbstractContextManager[None]:
    """Where functions call their Triton programs for tensors on `DEVICE`."""
    return nullcontext() if DEVICE == "cuda" else on_cuda_branches()


def as_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of kernels that has to call its Triton program, without gradients; results are on the CPU."""

    def by_triton(*given: Any, **named: Any) -> Any:
        moved = tree_map(lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x, given)
        launch = patch.object(KernelInterface, "__getitem__", autospec=True, side_effect=LAUNCH)
        with torch.no_grad(), on_device(), launch as launched:
            out = function(*moved, **named)
        assert launched.called
        return tree_map(Tensor.cpu, out)

    return by_triton


def both(function: Callable[..., Any]) -> pytest.MarkDecorator:
    """`program`: a function of kernels on a CPU, and as its Triton program."""
    programs = [function, pytest.param(as_program(function), marks=needs_triton)]
    return pytest.mark.parametrize("program", programs, ids=["torch", "triton"])


@contextmanager
def sharing(programs: int | None) -> Iterator[None]:
    """Let this many programs share the keys of each row, as many as fill the device if None."""
    with ExitStack() as stack:
        for kernel in ("decode", "past", "quantised", "ragged") if programs else ():
            counts = f"kvbench.kernels.triton.{kernel}_attention.count_splits"
            stack.enter_context(patch(counts, lambda *_: programs))
        yield


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
