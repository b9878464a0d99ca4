"""A finished call is answered from its run, unless anything that it depends on is another one since."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from kvbench.eval.files.weights import Snapshot, Weight
from kvbench.eval.paired.psnr import Psnr
from kvbench.runs import calls
from kvbench.runs.calls import recall, remember
from kvbench.runs.execute import run
from kvbench.runs.job import Job
from kvbench.runs.record.results import Outcome
from tests.support.fake_run import job_in


@dataclass(frozen=True)
class Needy(Psnr):
    """Lacks a package, a file and a folder of the Hub."""

    name: ClassVar[str] = "needy"
    packages: ClassVar[tuple[str, ...]] = ("late_package",)
    weights: ClassVar[tuple[Weight | Snapshot, ...]] = (
        Weight("late.pt", caches=("$LATE",)),
        Snapshot("owner/late", ("config.json",)),
    )

    def list_references(self, run: Path) -> dict[str, Path | None]:
        return {"real": run.parents[2] / "real", "late": None}


def make_job(root: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job in a folder that has all that the job reads, or will read once it is there."""
    monkeypatch.setenv("LATE", str(root / "late"))
    monkeypatch.setenv("HF_HUB_CACHE", str(root / "hub"))
    monkeypatch.setenv("HOME", str(root))
    job = job_in(root / "runs", count=2, evaluators={"psnr": Psnr(), "needy": Needy()})
    return replace(job, config={**job.config, "prompts": {"path": str(root / "prompts.txt")}})


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    write(tmp_path / "real" / "1.bmp", "a real image")
    write(tmp_path / ".cache/kvbench/prompts/set.jsonl", "{}")
    write(tmp_path / "prompts.txt", "one\n")
    return make_job(tmp_path, monkeypatch)


def asked_again(job: Job) -> Outcome | None:
    return recall(job.settings.runs_dir, job.config, job.method_name)


def test_only_the_same_call_finds_its_run(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_again(job) is None
    outcome = run(job)
    remember(job, outcome)
    assert asked_again(job) == replace(outcome, reused=True)
    again = run(job)  # the long way looks at every file, and changes none
    assert asked_again(job) == again
    assert asked_again(replace(job, config={**job.config, "seed": 1})) is None
    assert asked_again(replace(job, method_name="swa")) is None
    with monkeypatch.context() as patch:
        patch.setenv("KVBENCH_WEIGHTS", "/elsewhere")
        assert asked_again(job) is None
    monkeypatch.chdir(tmp_path)
    assert asked_again(job) is None


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def download_the_folder(_: Path) -> None:
    root = Path(os.environ["HF_HUB_CACHE"], "models--owner--late")
    write(root / "refs/main", "c0ffee")
    write(root / "snapshots/c0ffee/config.json", "{}")


def damage_the_record(folder: Path) -> None:
    [record] = (folder.parents[1] / ".calls").iterdir()
    record.write_text(record.read_text()[:-40])


def overwrite(path: Path) -> None:
    """Change the content but neither size nor time of modification."""
    times = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def answer_as_another_copy(folder: Path) -> None:
    """Write the record that another checkout of kvbench leaves."""
    [record] = (folder.parents[1] / ".calls").iterdir()
    call = json.loads(record.read_text())
    call["origins"]["kvbench"] = "/elsewhere/kvbench/__init__.py"
    record.write_text(json.dumps(call))


CHANGES: dict[str, Callable[[Path], object]] = {
    "no image": lambda folder: (folder / "images/000001.png").unlink(),
    "no image of the reference": lambda folder: next(folder.parent.glob("full-*/images/000000.png")).unlink(),
    "damaged results": lambda folder: write(folder / "results.json", "{"),
    "other prompts": lambda folder: write(folder.parents[2] / "prompts.txt", "another\n"),
    "a real image": lambda folder: overwrite(folder.parents[2] / "real/1.bmp"),
    "a downloaded set": lambda folder: overwrite(folder.parents[2] / ".cache/kvbench/prompts/set.jsonl"),
    "a file": lambda _: write(Path(os.environ["LATE"], "late.pt"), "1"),
    "a folder of the Hub": download_the_folder,
    "a package": lambda folder: write(folder.parents[2] / "late_package.py", ""),
    "damaged record": damage_the_record,
    "another copy of kvbench": answer_as_another_copy,
}


def test_a_change_sends_the_call_the_long_way(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job)
    for number, (what, change) in enumerate(CHANGES.items()):
        root = tmp_path / "copies" / str(number)
        shutil.copytree(tmp_path, root, ignore=shutil.ignore_patterns("copies"))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            copied = make_job(root, patch)
            outcome = run(copied)
            remember(copied, outcome)
            assert asked_again(copied) == outcome
            change(outcome.folder)
            assert asked_again(copied) is None, what


def test_what_changed_during_a_run_is_not_taken_for_what_it_read(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prompts.txt", "real/1.bmp"):
        job = make_job(tmp_path, monkeypatch)
        outcome = run(job)
        overwrite(tmp_path / name)
        remember(job, outcome)
        assert asked_again(job) is None
    job = make_job(tmp_path, monkeypatch)
    outcome = run(job)
    monkeypatch.setattr(calls, "STARTED", 0)  # before every source file
    remember(job, outcome)
    assert asked_again(job) is None


def test_a_call_that_is_logged_or_failed_is_made_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(replace(job, logger=object()), run(job))
    assert asked_again(job) is None
    monkeypatch.setattr(Psnr, "run", lambda *_: 1 / 0)
    job = replace(job, settings=replace(job.settings, seed=1))
    remember(job, run(job))
    assert asked_again(job) is None
