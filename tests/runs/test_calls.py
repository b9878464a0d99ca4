"""A finished call is answered from its run, unless anything that it depends on is another one since."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Snapshot, Weight
from kvbench.eval.paired.metrics import Psnr
from kvbench.eval.protocol.base import Result
from kvbench.runs.calls import recall, remember
from kvbench.runs.execute import file_used, run
from kvbench.runs.job import Job
from kvbench.runs.record.results import Outcome
from tests.support.fake_run import job_in


@dataclass(frozen=True)
class Needy(Psnr):
    """Lacks a package, a file and a folder of the Hub."""

    name: ClassVar[str] = "needy"
    packages: ClassVar[tuple[str, ...]] = ("late_package",)
    weights: ClassVar[tuple[Weight | Snapshot, ...]] = (
        Weight("late.pt", places=("$LATE",)),
        Snapshot("owner/late", ("config.json",)),
    )


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
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    job = job_in(tmp_path / "runs", count=2, evaluators={"psnr": Psnr(), "needy": Needy()})
    return replace(job, config={**job.config, "prompts": {"path": str(prompts)}})


def asked_again(job: Job) -> Outcome | None:
    return recall(job.settings.runs_dir, job.config, job.method_name)


def test_the_same_call_finds_its_run(job: Job) -> None:
    assert asked_again(job) is None
    outcome = run(job)
    remember(job, outcome, file_used(job))
    assert asked_again(job) == replace(outcome, reused=True)
    again = run(job)  # the long way looks at every file, and changes none
    assert asked_again(job) == again


def _delete_an_image(job: Job, folder: Path) -> None:
    (folder / "images" / "000001.png").unlink()


def _delete_an_image_of_the_reference(job: Job, folder: Path) -> None:
    next(folder.parent.glob("full-*/images/000000.png")).unlink()


def _damage_results(job: Job, folder: Path) -> None:
    (folder / "results.json").write_text("{")


def _write_other_prompts(job: Job, folder: Path) -> None:
    (job.settings.runs_dir.parent / "prompts.txt").write_text("another\n")


def _bring_the_file(job: Job, folder: Path) -> None:
    place = Path(os.environ["LATE"], "late.pt")
    place.parent.mkdir()
    place.write_bytes(b"1")


def _download_the_folder(job: Job, folder: Path) -> None:
    root = Path(os.environ["HF_HUB_CACHE"], "models--owner--late")
    for name, content in (("refs/main", "c0ffee"), ("snapshots/c0ffee/config.json", "{}")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def _install_the_package(job: Job, folder: Path) -> None:
    (job.settings.runs_dir.parent / "late_package.py").write_text("")


def _damage_the_record(job: Job, folder: Path) -> None:
    (record,) = (job.settings.runs_dir / ".calls").iterdir()
    record.write_text(record.read_text()[:-40])


def _write_a_foreign_record(job: Job, folder: Path) -> None:
    (record,) = (job.settings.runs_dir / ".calls").iterdir()
    record.write_text(json.dumps({"folder": 3}))


@pytest.mark.parametrize(
    "change",
    [
        _delete_an_image,
        _delete_an_image_of_the_reference,
        _damage_results,
        _write_other_prompts,
        _bring_the_file,
        _download_the_folder,
        _install_the_package,
        _damage_the_record,
        _write_a_foreign_record,
    ],
)
def test_a_change_sends_the_call_the_long_way(
    job: Job, change: Callable[[Job, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(job.settings.runs_dir.parent))
    outcome = run(job)
    remember(job, outcome, file_used(job))
    assert asked_again(job) is not None
    change(job, outcome.folder)
    assert asked_again(job) is None


def test_another_configuration_environment_or_place_is_another_call(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(job, run(job), file_used(job))
    assert asked_again(replace(job, config={**job.config, "seed": 1})) is None
    assert asked_again(replace(job, method_name="swa")) is None
    with monkeypatch.context() as patch:
        patch.setenv("KVBENCH_WEIGHTS", "/elsewhere")
        assert asked_again(job) is None
    monkeypatch.chdir(tmp_path)
    assert asked_again(job) is None


def test_a_call_that_is_logged_elsewhere_is_always_made(job: Job) -> None:
    class Silent:
        def send(self, *_: object) -> None:
            """Send nothing."""

    logged = replace(job, logger=Silent())
    remember(logged, run(logged), file_used(logged))
    assert asked_again(logged) is None


def test_a_call_with_a_failed_metric_is_made_again(job: Job) -> None:
    failing = replace(job, evaluators={"psnr": Failing()})
    remember(failing, run(failing), file_used(failing))
    assert asked_again(failing) is None
