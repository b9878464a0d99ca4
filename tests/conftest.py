"""Shared set-up: the checkout importable without installation, one thread per process."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
