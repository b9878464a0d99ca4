"""What made a run is told."""

import subprocess
from pathlib import Path

import pytest

from kvbench.runs.record.provenance import provenance


def test_a_checkout_names_its_commit(root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    code = provenance("cpu")["code"]
    assert isinstance(code, dict)
    assert code["commit"] == head.stdout.strip()
