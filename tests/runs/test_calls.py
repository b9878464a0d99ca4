"""A finished call is answered from its run, unless anything that it depends on is another one since."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Snapshot, Weight
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.base import Result
from kvbench.runs import calls
from kvbench.runs.calls import recall, remember
from kvbench.runs.execute import run
from kvbench.runs.job import Job
from kvbench.runs.record.results import Outcome
from tests.support.fake_run import job_in
from tests.support.marks import slow_except


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


@dataclass(frozen=True)
class Failing(Psnr):
    """Fails."""

    name: ClassVar[str] = "failing"

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        raise ValueError("not today")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("LATE", str(tmp_path / "late"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "real" / "1.bmp", "a real image")
    write(tmp_path / ".cache/kvbench/prompts/set.jsonl", "{}")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    job = job_in(tmp_path / "runs", count=2, evaluators={"psnr": Psnr(), "needy": Needy()})
    return replace(job, config={**job.config, "prompts": {"path": str(prompts)}})


def asked_again(job: Job) -> Outcome | None:
    return recall(job.settings.runs_dir, job.config, job.method_name)


def test_the_same_call_finds_its_run(job: Job) -> None:
    assert asked_again(job) is None
    outcome = run(job)
    remember(job, outcome)
    assert asked_again(job) == replace(outcome, reused=True)
    again = run(job)  # the long way looks at every file, and changes none
    assert asked_again(job) == again


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


def write_a_foreign_record(folder: Path) -> None:
    [record] = (folder.parents[1] / ".calls").iterdir()
    record.write_text(json.dumps({"folder": 3}))


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
    "foreign record": write_a_foreign_record,
}
QUICK = ("no image", "other prompts", "a file", "damaged record", "another copy of kvbench")


@pytest.mark.parametrize("change", slow_except(QUICK.__contains__, CHANGES))
def test_a_change_sends_the_call_the_long_way(job: Job, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(job.settings.runs_dir.parent))
    outcome = run(job)
    remember(job, outcome)
    assert asked_again(job) is not None
    CHANGES[change](outcome.folder)
    assert asked_again(job) is None


EDITS: dict[str, Callable[[Job, pytest.MonkeyPatch], object]] = {
    "prompts": lambda job, _: overwrite(job.settings.runs_dir.parent / "prompts.txt"),
    "a real image": lambda job, _: overwrite(job.settings.runs_dir.parent / "real/1.bmp"),
    "a real image less": lambda job, _: (job.settings.runs_dir.parent / "real/1.bmp").unlink(),
    "code": lambda _, patch: patch.setattr(calls, "STARTED", 0),  # before every source file
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_changed_during_a_run_is_not_taken_for_what_it_read(
    edit: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run(job)
    EDITS[edit](job, monkeypatch)
    remember(job, outcome)
    assert asked_again(job) is None


def test_what_makes_another_call(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(job, run(job))
    assert asked_again(replace(job, config={**job.config, "seed": 1})) is None
    assert asked_again(replace(job, method_name="swa")) is None
    with monkeypatch.context() as patch:
        patch.setenv("KVBENCH_WEIGHTS", "/elsewhere")
        assert asked_again(job) is None
    monkeypatch.chdir(tmp_path)
    assert asked_again(job) is None


@pytest.mark.parametrize(
    "more", [{"logger": object()}, {"evaluators": {"psnr": Failing()}}], ids=["logged", "failed"]
)
def test_a_call_that_is_logged_or_failed_is_made_again(job: Job, more: dict[str, Any]) -> None:
    job = replace(job, **more)
    remember(job, run(replace(job, logger=None)))
    assert asked_again(job) is None
