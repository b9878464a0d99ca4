"""Stand-in for a GPU in tests: tensors without numbers on it."""

from typing import Any

import torch
from torch import Tensor

CUDA = torch.device("cuda:0")


def faked(value: Any) -> Any:
    """The same shapes on the device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=CUDA)
    if hasattr(value, "_fields"):
        return type(value)(*map(faked, value))
    return tuple(map(faked, value)) if isinstance(value, tuple) else value
