"""The page that is written while a sweep runs: again and again, and at last one that does not reload itself."""

import json
from pathlib import Path

import pytest

from kvbench.cli.sweeps.jobs import name_sweep, open_folder, write_entry
from kvbench.dashboard.page import FILE
from kvbench.runs.record.sweeps import JobStatus
from tests.support.command_line import Command
from tests.support.run_folders import publish_runs, write_image_runs

RELOAD = '<meta http-equiv="refresh" content="7">'
JOBS = [("method=swa",), ("method=random",), ("method=h2o",)]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = open_folder(tmp_path / "runs", JOBS)
    write_entry(folder, JobStatus(0, JOBS[0], "failed", error="e"))
    return folder


def watch(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep: object, *more: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("kvbench.cli.tasks.dashboard.time", type("Clock", (), {"sleep": staticmethod(sleep)}))
    words = (f"runs_dir={tmp_path / 'runs'}", "dashboard.watch=true", "dashboard.every=7")
    return command("task=dashboard", *words, *more)


def test_the_page_is_written_again_until_the_sweep_is_done(
    command: Command, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, seen = tmp_path / "runs" / FILE, []

    def sleep(seconds: float) -> None:
        number = len(seen) + 1
        seen.append((seconds, RELOAD in page.read_text(), f"reason {number - 1}" in page.read_text()))
        write_entry(sweep, JobStatus(number, JOBS[number], "failed", error=f"reason {number}"))

    status, out, _ = watch(command, tmp_path, monkeypatch, sleep)
    assert (status, out.splitlines()[-1]) == (0, f"written: {page}")
    assert seen == [(7.0, True, False), (7.0, True, True)]
    assert "reason 2" in page.read_text()
    assert RELOAD not in page.read_text()


def test_an_interrupted_watch_leaves_a_page_that_stays(
    command: Command, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    assert watch(command, tmp_path, monkeypatch, sleep)[0] == 0
    assert RELOAD not in (tmp_path / "runs" / FILE).read_text()


def test_a_sweep_has_a_page_of_its_runs_and_their_references(command: Command, tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    runs = write_image_runs(runs_dir)
    folder = open_folder(runs_dir, [("method=heatkv",)])
    own = str(runs_dir / runs[1].model / runs[1].run)
    write_entry(folder, JobStatus(0, ("method=heatkv",), "finished", folder=own))
    name_sweep(folder, "main")
    for word in ("sweep.name=main", f"work.folder={folder}"):
        assert command("task=dashboard", f"runs_dir={runs_dir}", word)[0] == 0
        page = (runs_dir / FILE).read_text()
        document = json.loads(page.split('id="document">')[1].split("</script>")[0])
        assert {run["folder"] for run in document["runs"]} == {
            f"{run.model}/{run.run}" for run in (runs[0], runs[1])
        }
    status, _, error = command("task=dashboard", f"runs_dir={runs_dir}", "sweep.name=other")
    assert status != 0
    assert "sweep.name=other: no sweep" in error


def test_a_page_has_the_datasets_of_runs_dirs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    publish_runs(tmp_path / "made" / "ada", {"heatkv": (26.0, 25.0, 24.0, 27.0)})
    status, out, _ = command("task=dashboard", "runs_dirs=[made/*]", "output=page")
    assert (status, out.splitlines()[-1]) == (0, "written: page/dashboard.html")
    assert [line for line in out.splitlines() if line.startswith("left out: ")] == [
        "left out: made/ada-runs: is not a published dataset: it lacks SHA256SUMS or runs/; see kvbench publish"
    ]
    assert '"dataset":"ada"' in (tmp_path / "page" / FILE).read_text()
    assert command("task=dashboard", "runs_dirs=[made/ada]", "output=page", "dashboard.bundle=true")[0] == 0
