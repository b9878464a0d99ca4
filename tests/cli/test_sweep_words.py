"""Tasks that read a sweep's jobs find them by the sweep's words, and change nothing of them."""

from pathlib import Path

import pytest

from kvbench.cli.sweeps.folder import find_reading_words, find_words
from kvbench.cli.sweeps.jobs import Entry, find_folder, write_entry
from tests.support.command_line import Command

WORDS = ("method=random,swa", "budget=0.1")


@pytest.mark.parametrize(
    ("arguments", "of_sweep", "reading"),
    [
        (("-m", "task=report", *WORDS), True, None),
        (("task=report", *WORDS), True, None),
        (("task=report", "sweeps=budget"), True, None),
        (("-m", "task=report"), False, ["task=report"]),
        (("task=report",), False, None),
        (("-m", "task=dashboard"), False, ["task=dashboard"]),
        (("-m", *WORDS), False, None),
    ],
    ids=str,
)
def test_what_a_reading_task_is_about(
    arguments: tuple[str, ...], of_sweep: bool, reading: list[str] | None
) -> None:
    assert (find_words(arguments) is not None) == of_sweep
    if not of_sweep:
        assert find_reading_words(arguments) == reading


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
