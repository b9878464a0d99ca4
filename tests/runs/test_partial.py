"""Runs that are drawn block by block: no more than needed, one preparation, and the bytes of a run drawn at once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs import execute
from kvbench.runs.job import Job
from kvbench.runs.partial import PartialRun, begin, extend
from tests.support.fake_run import Fake, images_of, job_in


@dataclass
class Counting(StreamingLLM):
    """A method that counts its preparations."""

    sinks: int = 1
    prepared: int = 0

    def prepare(self, *given: Any) -> None:
        self.prepared += 1
        super().prepare(*given)


def begin_both(job: Job) -> tuple[PartialRun, PartialRun]:
    return begin(job), begin(job.reference)


def test_blocks_are_drawn_as_far_as_needed_and_equal_a_whole_run(tmp_path: Path) -> None:
    whole = execute.run(job_in(tmp_path / "whole", 10)).folder
    job = job_in(tmp_path / "blocks", 10)
    run, reference = begin_both(job)
    assert isinstance(job.model, Fake)
    for stop, batches in ((4, [2, 2]), (4, []), (7, [2, 2]), (8, [])):
        job.model.batches.clear()
        extend(reference, range(stop))
        extend(run, range(stop), reference.folder.path)
        assert job.model.batches == 2 * batches
    assert sorted(images_of(run.folder.path)) == [f"{index:06d}.png" for index in range(8)]
    assert not run.folder.finished()
    job.model.batches.clear()
    outcome = execute.run(job)
    assert job.model.batches == [2, 2]  # the last two samples, of the run and of its reference
    assert outcome.folder == run.folder.path
    assert images_of(outcome.folder) == images_of(whole)
    scores = [json.loads((path / "results.json").read_text())["metrics"] for path in (outcome.folder, whole)]
    assert scores[0] == scores[1]


def test_a_method_is_prepared_once(tmp_path: Path) -> None:
    method = Counting()
    job = job_in(tmp_path, 6, method=method)
    run, reference = begin_both(job)
    for stop in (2, 4, 6):
        extend(reference, range(stop))
        extend(run, range(stop), reference.folder.path)
    assert method.prepared == 1


def test_samples_of_a_shorter_run_are_taken(tmp_path: Path) -> None:
    execute.run(job_in(tmp_path, 4))
    job = job_in(tmp_path, 10)
    run, _ = begin_both(job)
    assert set(run.folder.recorded()) == set(range(4))
    assert isinstance(job.model, Fake)
    assert job.model.batches == []
