"""Several processes at one run: each piece of work is done once, and what any of them finds is kept.

Threads stand for processes: they share nothing but the folder, whose claims belong to open files.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor

from kvbench.core.claims import claim
from kvbench.core.files import hash_path
from kvbench.eval.files.images import ImageSet
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.base import Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, Score
from kvbench.methods.heatkv.method import HeatKV
from kvbench.models.base import Cache
from kvbench.models.noise import Noise
from kvbench.runs import execute, prepare
from kvbench.runs.job import Busy, Job
from kvbench.runs.record.results import Outcome
from tests.support.fake_run import Fake, images_of, job_in, open_folder


class Killed(BaseException):
    """Stands for the end of a process."""


def together(jobs: Sequence[Job]) -> list[Outcome]:
    """Run jobs at once, each in a thread."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(execute.run, jobs))


def made(jobs: Sequence[Job]) -> int:
    return sum(len(job.model.batches) for job in jobs)


def test_one_call_four_times_does_its_work_once(tmp_path: Path) -> None:
    alone = execute.run(job_in(tmp_path / "alone", method=HeatKV(sinks=1)))
    jobs = [job_in(tmp_path / "four", method=HeatKV(sinks=1), model=Fake(pause=0.01)) for _ in range(4)]
    outcomes = together(jobs)
    calibrations, blocks = 1, 5
    assert made(jobs) == calibrations + 2 * blocks
    assert len({outcome.folder for outcome in outcomes}) == 1
    assert outcomes[0].folder.name == alone.folder.name
    assert images_of(outcomes[0].folder) == images_of(alone.folder)
    for outcome in outcomes:
        assert outcome.results.metrics == alone.results.metrics
    hidden = [path.name for path in (tmp_path / "four").rglob(".*") if path.is_file()]
    assert hidden == []


def test_other_batch_sizes_leave_records_that_belong_to_their_images(tmp_path: Path) -> None:
    jobs = [job_in(tmp_path, batch_size=size, model=Fake(pause=0.01)) for size in (2, 3, 5)]
    for outcome in together(jobs):
        assert len(ImageSet(outcome.folder)) == 10


class Dying(Fake):
    """Stands for a process that is killed in the middle of its first block, while another one works."""

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        started.set()
        super().generate(prompts, cache, noise)
        raise Killed


started = threading.Event()


def test_the_block_of_a_process_that_died_is_taken_over(tmp_path: Path) -> None:
    started.clear()
    with ThreadPoolExecutor(2) as pool:
        dying = pool.submit(execute.run, job_in(tmp_path, model=Dying(pause=0.3)))
        assert started.wait(30)
        survivor = job_in(tmp_path)
        outcome = execute.run(survivor)
        with pytest.raises(Killed):
            dying.result()
    assert outcome.results is not None
    assert sum(survivor.model.batches) == 20
    assert images_of(outcome.folder) == images_of(execute.run(job_in(tmp_path / "alone")).folder)


@dataclass(frozen=True)
class Found(Psnr):
    """Finds one number under its own name, while others find theirs or after them."""

    name: ClassVar[str] = "found"
    needs_reference: ClassVar[bool] = False
    calls: ClassVar[list[str]] = []
    meet: ClassVar[Callable[[], object]] = lambda: None

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        type(self).meet()
        self.calls.append(self.name)
        return make_result(self, {self.name: Score(len(self.name), len(images))})


def finding(name: str, meet: Callable[[], object] = lambda: None) -> Found:
    """An evaluator of its own name."""
    content = {"name": name, "metrics": {name: MetricSpec("higher")}, "calls": [], "meet": staticmethod(meet)}
    source = {"__module__": __name__, "__qualname__": "finding"}  # its code is part of a score's identity
    return type(name, (Found,), content | source)()


def scoring(root: Path, *evaluators: Found) -> Job:
    return job_in(root, count=4, evaluators={one.name: one for one in evaluators})


def test_metrics_of_evaluators_that_run_at_once_are_all_kept(tmp_path: Path) -> None:
    execute.run(job_in(tmp_path, count=4))
    barrier = threading.Barrier(4, timeout=600)
    names = ("aa", "bbb", "cccc", "ddddd")
    outcomes = together([scoring(tmp_path, finding(name, barrier.wait)) for name in names])
    [folder] = {outcome.folder for outcome in outcomes}
    reference = folder.parent / json.loads((folder / "results.json").read_text())["reference"]
    for place in (folder, reference):
        results = json.loads((place / "results.json").read_text())
        assert {name: results["metrics"][name]["value"] for name in names} == {
            name: len(name) for name in names
        }
        assert set(results["evaluated"]) == {"psnr", *names}
        assert "psnr" in results["metrics"]


def test_one_evaluator_at_once_scores_once(tmp_path: Path) -> None:
    evaluator = finding("once")
    outcomes = together([scoring(tmp_path, evaluator) for _ in range(4)])
    assert evaluator.calls == ["once"] * 2  # the reference and the run
    assert all(
        outcome.results is not None and outcome.results.metrics["once"].value == 4 for outcome in outcomes
    )


def test_a_process_that_comes_late_leaves_the_results_as_they_are(tmp_path: Path) -> None:
    folder = execute.run(job_in(tmp_path)).folder
    before = {path: path.read_bytes() for path in sorted(folder.rglob("[!.]*")) if path.is_file()}
    (folder / "status").write_text("running\n")  # written by a process that is about to find everything done
    outcome = execute.run(job_in(tmp_path))
    assert outcome.results is not None
    assert {path: path.read_bytes() for path in sorted(folder.rglob("[!.]*")) if path.is_file()} == before


def test_a_scoring_error_leaves_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = execute.run(job_in(tmp_path, count=4)).folder
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.runs.score.finish.score", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            execute.run(scoring(tmp_path, finding("more")))
    assert (folder / "status").read_text() == "done\n"
    assert execute.run(job_in(tmp_path, count=4)).reused


def test_who_does_not_wait_does_all_that_nobody_else_does(tmp_path: Path) -> None:
    job = job_in(tmp_path, method=HeatKV(sinks=1), wait_for_others=False)
    job.model.load("cpu")
    calibration = prepare.locate_calibration(job, job.method.needs())[0]
    with claim(calibration.with_name(f".{calibration.stem}")), pytest.raises(Busy):
        execute.run(job)
    assert job.model.batches == []
    opened: dict[str, int] = {}
    full = open_folder(job.reference)
    with claim(full.place("block-2-4")):
        outcome = execute.run(job, lambda folder, count: opened.update({folder.name: count}))
    assert outcome.results is None
    assert opened == {outcome.folder.name: 10, full.path.name: 10}
    assert made([job]) == 1 + 4 + 5  # calibration, the reference without a block, the run
    with claim(full.place("eval-psnr")):
        assert execute.run(job).results is None
    assert made([job]) == 1 + 5 + 5
    assert execute.run(job).results is not None
    assert made([job]) == 1 + 5 + 5


def test_a_helper_leaves_damage_to_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def helper() -> Job:
        return job_in(tmp_path, wait_for_others=False, is_leader=False)

    first = helper()
    first.model.load("cpu")
    folder = open_folder(first)
    with claim(folder.place("block-2-4")):
        assert execute.run(first).results is None
    image = folder.path / "images/000008.png"
    image.write_bytes(before := image.read_bytes()[:-1])  # no one knows this file yet
    looked: list[str] = []
    monkeypatch.setattr(
        "kvbench.runs.record.folder.hash_path", lambda path: looked.append(path.name) or hash_path(path)
    )
    second = helper()
    with claim(folder.place("eval-psnr")):
        assert execute.run(second).results is None  # it draws the last block, and another one scores
    assert made([first, second]) == 5 + 5
    assert looked == []
    leader = job_in(tmp_path, wait_for_others=False)
    assert execute.run(leader).results is not None
    assert made([leader]) == 1
    assert image.read_bytes() != before


def test_who_helps_scores_after_its_block_what_is_undamaged(tmp_path: Path) -> None:
    for damaged in (False, True):
        root = tmp_path / str(damaged)
        jobs = [job_in(root, wait_for_others=False, is_leader=is_leader) for is_leader in (True, False)]
        jobs[0].model.load("cpu")
        folder = open_folder(jobs[0])
        with claim(folder.place("block-2-4")):
            assert execute.run(jobs[0]).results is None
        if damaged:
            (folder.path / "images/000008.png").write_bytes(b"torn")
        assert (execute.run(jobs[1]).results is None) == damaged
        assert made(jobs) == 5 + 5
