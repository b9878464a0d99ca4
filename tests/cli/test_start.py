"""What a command imports before it does its work: seconds that a mistyped key need not wait for."""

import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvbench.cli.app import main
from kvbench.core.settings import TASKS
from tests.support.command_line import run_python
from tests.support.places import ROOT

SLOW = ("torch", "scipy", "matplotlib", "transformers", "torchvision", "torchmetrics", "torch._dynamo")
"""Packages whose import takes between half a second and six."""
PROGRAM = f"""
import atexit, json, sys
from kvbench.cli.app import main
atexit.register(lambda: print(json.dumps([name for name in {SLOW} if name in sys.modules]), file=sys.stderr))
main()
"""


def slow_imports(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Which slow packages a command imported, and what it printed."""
    done = run_python(folder, "-c", PROGRAM, *arguments, KVBENCH_FEATURES=str(folder))
    return json.loads(done.stderr.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "method: adakv, ams_kv"),
        (["--cfg", "job"], "task: run"),
        (["metod=x"], "did you mean method?"),
        (["method=heatkvv"], "method=heatkvv: no such choice"),
        (["model.sampling.cgf=1"], "model.sampling.cgf: no such key"),
        (["seed=abc"], "seed=abc: must be a whole number"),
    ],
    ids=str,
)
def test_what_needs_no_model_imports_nothing_slow(tmp_path: Path, arguments: list[str], said: str) -> None:
    slow, printed = slow_imports(tmp_path, *arguments)
    assert said in printed
    assert slow == []


def test_help_begins_with_examples_and_every_task() -> None:
    header = OmegaConf.load(ROOT / "conf" / "config.yaml").hydra.help.header
    assert header.count("\n  python run.py ") == 3
    assert [line.split()[0] for line in header.splitlines() if line.startswith("task=")] == [
        f"task={task}" for task in TASKS
    ]


def test_verbose_is_a_setting_and_a_short_word(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("kvbench.cli.app.run_command", seen.append)
    for word in ("-v", "--verbose", "verbose=true"):
        monkeypatch.setattr(sys, "argv", ["run.py", "seed=1", word])
        main()
    assert [command.words for command in seen] == [("seed=1", "verbose=true")] * 3


@pytest.mark.slow
def test_a_run_imports_neither_torchs_compiler_nor_what_it_does_not_use(tmp_path: Path) -> None:
    call = ("method=heatkv", "budget=0.1", "prompts.count=2", "calibrate.count=1")
    slow, printed = slow_imports(tmp_path, *call)
    assert " finished: runs/infinity_tiny/heatkv-0.1-" not in printed
    assert "finished: runs/infinity_tiny/heatkv-0.1-" in printed
    assert set(slow) <= {"torch", "scipy"}
    slow, again = slow_imports(tmp_path, *call)
    assert slow == []
    shown, _, rest = again.partition("found finished: runs/infinity_tiny/heatkv-0.1-")
    assert rest
    assert shown in printed
