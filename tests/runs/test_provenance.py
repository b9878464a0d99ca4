"""What made a run is told."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch

from kvbench.kernels.attention_paths import TABLE
from kvbench.kernels.batch_invariance import MATMUL
from kvbench.runs.record.provenance import describe_arithmetic, provenance


def test_a_checkout_names_its_commit(root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    code = provenance("cpu", None)["code"]
    assert isinstance(code, dict)
    assert code["commit"] == head.stdout.strip()


def test_the_arithmetic_of_a_run_is_told() -> None:
    before = MATMUL.allow_tf32
    try:
        MATMUL.allow_tf32 = True
        told = json.loads(json.dumps(describe_arithmetic("cpu", 64, torch.float32)))
    finally:
        MATMUL.allow_tf32 = before
    assert told["batch_invariant"] is False
    assert told["matmul"]["allow_tf32"] is True
    assert told["cudnn"] == {
        "version": torch.backends.cudnn.version(), "allow_tf32": torch.backends.cudnn.allow_tf32,
    }  # fmt: skip
    assert told["attention"]["table_sha256"] == hashlib.sha256(TABLE.read_bytes()).hexdigest()
    assert told["attention"]["paths"]["products"] == "can serve"
