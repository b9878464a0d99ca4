"""Where Triton programs run in tests: on a GPU if there is one, else in Triton's interpreter on CPU tensors."""

import importlib.util

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
