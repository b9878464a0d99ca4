"""Choice between a Triton program and torch's own operations."""

import torch
from torch import Tensor


def runs_program(x: Tensor) -> bool:
    """Return whether a tensor goes through a Triton program: on a GPU, without gradients, which programs lack."""
    return x.is_cuda and not torch.is_grad_enabled()
