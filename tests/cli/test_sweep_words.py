"""Tasks that read a sweep's jobs find them by the sweep's words, and change nothing of them."""

from pathlib import Path

import pytest

from kvbench.cli.config.command import Command as Words
from kvbench.cli.sweeps.jobs import Entry, find_folder, write_entry
from tests.support.command_line import Command

WORDS = ("method=random,swa", "budget=0.1")


@pytest.mark.parametrize(
    ("arguments", "of_sweep", "of_all_runs"),
    [
        (("-m", "task=report", *WORDS), True, False),
        (("task=report", *WORDS), True, False),
        (("task=report", "sweeps=budget"), True, False),
        (("task=report", "sweeps=null"), False, True),
        (("task=report", "work.folder=x"), True, False),
        (("-m", "task=report"), False, True),
        (("task=report",), False, True),
        (("-m", "task=dashboard"), False, True),
        (("task=export", "sweeps=budget"), False, True),
        (("task=status",), True, False),
        (("task=work", "--cfg", "job"), False, False),
        (("-m", *WORDS), False, False),
    ],
    ids=str,
)
def test_what_a_command_is_about(arguments: tuple[str, ...], of_sweep: bool, of_all_runs: bool) -> None:
    words = Words.parse(arguments)
    assert (words.is_about_sweep, words.is_about_all_runs) == (of_sweep, of_all_runs)
    assert words.overrides == tuple(word for word in arguments if word != "-m")


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", ["status", "report"])
@pytest.mark.parametrize("multirun", [(), ("-m",)])
def test_reading_tasks_leave_the_ledger_alone(
    tmp_path: Path, command: Command, task: str, multirun: tuple[str, ...]
) -> None:
    jobs = [(f"method={name}", "budget=0.1", f"runs_dir={tmp_path}") for name in ("random", "swa")]
    folder = find_folder(tmp_path, jobs)
    write_entry(folder, Entry(0, jobs[0], outcome="failed", error="why not"))
    before = read_all(tmp_path)
    status, _, err = command(*multirun, f"task={task}", *reversed(WORDS), f"runs_dir={tmp_path}")
    assert status == (task == "report")
    assert ("holds no finished runs of this sweep" in err) == (task == "report")
    assert read_all(tmp_path) == before


@pytest.mark.parametrize("task", ["status", "report"])
def test_a_sweep_that_was_not_started_is_not_made(tmp_path: Path, command: Command, task: str) -> None:
    status, _, err = command(f"task={task}", *WORDS, f"runs_dir={tmp_path}")
    assert status == 1
    assert f"task={task}: no sweep with these overrides was started in " in err
    assert read_all(tmp_path) == {}
