"""Where Triton programs run in tests: on a GPU if there is one, else in Triton's interpreter on CPU tensors."""

import importlib.util

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = importlib.util.find_spec("triton") is not None

if HERE:
    import triton
    import triton.language as tl

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


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
