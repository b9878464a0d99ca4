"""What a command imports before it does its work: seconds that a mistyped key need not wait for."""

import json
import sys
from pathlib import Path

import pytest

import kvbench
from kvbench.cli.app import main
from kvbench.cli.tasks.table import COMMANDS
from kvbench.core.settings import TASKS
from tests.support.command_line import RUN, Command, run_python

SLOW = ("torch", "scipy", "matplotlib", "transformers", "torchvision", "torchmetrics", "torch._dynamo")
"""Packages whose import takes between half a second and six."""
PROGRAM = f"""
import atexit, json, sys
from kvbench.cli.app import main
from kvbench.cli.tasks.table import COMMANDS
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
        (["--help", "-v"], "method: adakv, ams_kv"),
        (["-m", "method=h2o,swa", "--cfg", "job"], "1  method=swa"),
        (["metod=x"], "did you mean method?"),
        (["seed=abc"], "seed=abc: must be a whole number"),
    ],
    ids=str,
)
def test_what_needs_no_model_imports_nothing_slow(tmp_path: Path, arguments: list[str], said: str) -> None:
    slow, printed = slow_imports(tmp_path, *arguments)
    assert said in printed
    assert slow == []


@pytest.mark.slow
def test_what_reads_runs_and_finished_sweeps_imports_no_torch(tmp_path: Path) -> None:
    sweep = ("-m", "method=random,swa", "budget=0.2", "prompts.count=1", "eval=none", "sweep.name=two")
    _, printed = slow_imports(tmp_path, *sweep)
    assert printed.count("found finished") == 0
    slow, printed = slow_imports(tmp_path, *sweep)
    assert "2 of 2 jobs found finished\n" in printed
    assert slow == []
    for words in ("task=report", "task=report sweep.name=two", "task=merge from=runs runs_dir=b"):
        slow, printed = slow_imports(tmp_path, *words.split())
        assert "error" not in printed
        assert "torch" not in slow
    slow, printed = slow_imports(tmp_path, "task=report", "report.metrics=3")
    assert "report.metrics=3: must be a list" in printed


def test_the_version_is_that_of_kvbench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--version"])
    monkeypatch.setenv("KVBENCH_COMMIT", "12ab")
    main()
    assert capsys.readouterr().out == f"kvbench {kvbench.__version__} (commit 12ab)\n"


def test_a_shell_completes_choices(tmp_path: Path) -> None:
    done = run_python(tmp_path, RUN, "-sc", "query=bash", COMP_LINE="python run.py method=heat")
    assert set(done.stdout.split()) == {"method=heatkv", "method=heatkv_naive"}
    script = run_python(tmp_path, RUN, "-sc", "install=bash").stdout
    assert script.strip().endswith("complete -o nospace -o default -F hydra_bash_completion python")


def test_a_logger_that_is_not_installed_is_refused_before_a_run(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, _, err = command("logger=wandb", "prompts.count=1")
    assert (status, err) == (1, 'error: logger=wandb: not installed; pip install "kvbench[wandb]"\n')


def test_help_is_one_screen_of_all_tasks_and_commands(command: Command) -> None:
    lines = command("--help")[1].splitlines()
    assert (len(lines) <= 40, max(map(len, lines)) <= 80) == (True, True)
    assert [line.split()[0][5:] for line in lines if line.startswith("task=")] == [*TASKS]
    assert {line.split()[1] for line in lines if line.startswith("kvbench ")} >= {*COMMANDS}


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
