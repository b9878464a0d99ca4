"""Shared set-up: the checkout importable without installation, one thread per process, a feature store of its own."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
_STORE = tempfile.TemporaryDirectory(prefix="kvbench-features-")
os.environ["KVBENCH_FEATURES"] = _STORE.name


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
