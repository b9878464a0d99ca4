"""Scores are computed anew when answers, lines or real images change, from the samples that exist."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.distribution.cmmd import CmmdReal
from kvbench.eval.distribution.fid import FidReal
from kvbench.eval.distribution.mind import MindReal
from kvbench.eval.distribution.precision_recall import PrecisionRecallReal
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.base import Evaluator
from kvbench.eval.protocol.inputs import find_changes, hash_inputs
from kvbench.eval.spaces.scenes import Scenes
from kvbench.eval.text.answers import AnswerChange, Answers
from kvbench.eval.text.length import TextLength
from kvbench.methods.full import Full
from kvbench.prompts.base import Prompt
from kvbench.prompts.files import PromptFile
from kvbench.runs import execute
from kvbench.runs.job import Job
from kvbench.runs.record.results import Outcome
from kvbench.runs.score.scoring import score
from tests.support.fake_run import job_in
from tests.support.image_sets import FEATURES
from tests.support.small_models import small_writer

COUNT = 6
SPACE = Scenes(str(FEATURES))


@dataclass(frozen=True)
class Same(Answers):
    """A text is correct if it is the answer."""

    name: ClassVar[str] = "same"
    protocol: ClassVar[str] = "plain"

    def grade(self, text: str, correct: object) -> float:
        return float(text == correct)


@dataclass(frozen=True)
class SameChange(AnswerChange, Same):
    name: ClassVar[str] = "same_change"


ANSWERED = {"same": Same(), "same_change": SameChange(), "length": TextLength()}


def make_text_job(root: Path, answers: Sequence[str], evaluators: Mapping[str, Evaluator] = ANSWERED) -> Job:
    """A job whose prompts are read from a file with answers."""
    file = root / "prompts.jsonl"
    root.mkdir(exist_ok=True)
    lines = [{"prompt": f"prompt {i}", "answer": answer} for i, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = PromptFile(str(file)).load()
    return without_settings(job_in(root, model=small_writer(20), prompts=prompts, evaluators=evaluators))


def without_settings(job: Job) -> Job:
    """The job with configurations of evaluators that YAML can hold."""
    return replace(job, config={**job.config, "eval": {name: {} for name in job.evaluators}})


def make_image_job(root: Path, evaluators: Mapping[str, Evaluator]) -> Job:
    prompts = [Prompt(i, f"prompt {i}") for i in range(COUNT)]
    return without_settings(job_in(root, prompts=prompts, evaluators=evaluators))


def read_texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "texts").iterdir())]


def value(outcome: Outcome, name: str) -> float | None:
    return outcome.results.metrics[name].value


def read_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_corrected_answers_count_and_texts_stay(tmp_path: Path) -> None:
    first = execute.run(make_text_job(tmp_path, ["wrong"] * COUNT))
    assert value(first, "same") == 0
    right, times = read_texts(first.folder), read_times(first.folder / "metrics")
    texts = read_times(first.folder / "texts")
    second = execute.rescore(make_text_job(tmp_path, [*right[:-1], "wrong"]))
    assert read_times(first.folder / "texts") == texts
    assert second.folder == first.folder
    assert value(second, "same") == pytest.approx(1 - 1 / COUNT)
    stays = "text_length-tokens.json"
    assert read_times(first.folder / "metrics")[stays] == times[stays]
    records = [json.loads(text) for text in (first.folder / "samples.jsonl").read_text().splitlines()]
    assert [record["meta"]["answer"] for record in records] == [*right[:-1], "wrong"]
    assert execute.run(make_text_job(tmp_path, [*right[:-1], "wrong"])).reused
    assert value(execute.run(make_text_job(tmp_path, ["wrong"] * COUNT)), "same") == 0


def test_both_sides_of_a_change_are_judged_by_the_same_answers(tmp_path: Path) -> None:
    """The reference's record of answers may come from a call with other prompts and metrics."""
    wrong, only_words = ["wrong"] * COUNT, {"same": Same()}
    full = execute.run(replace(make_text_job(tmp_path, wrong), method=Full(), method_name="full"))
    right = read_texts(full.folder)
    reference = replace(make_text_job(tmp_path, right), method=Full(), method_name="full")
    execute.run(reference)
    execute.run(replace(make_text_job(tmp_path, wrong, only_words), method=Full(), method_name="full"))
    outcome = execute.run(make_text_job(tmp_path, right, {"same_change": SameChange()}))
    own = read_texts(outcome.folder)
    expected = sum(a == b for a, b in zip(own, right, strict=True)) / COUNT - 1
    assert value(outcome, "same_change") == pytest.approx(expected)


def test_the_answers_of_the_call_count_whatever_another_process_records(tmp_path: Path) -> None:
    evaluators, inputs = {"same": Same()}, {"same": {"prompts.answer": "a digest"}}
    folder = execute.run(make_text_job(tmp_path, ["wrong"] * COUNT, evaluators)).folder
    metadata: list[dict[str, object]] = [{"answer": text} for text in read_texts(folder)]
    evaluated, metrics = score(folder, None, evaluators, {}, inputs, metadata, "cpu")
    assert metrics["same"].value == 1
    assert evaluated["same"].inputs == inputs["same"]


def draw_real(folder: Path, seed: int) -> None:
    """Write noise as BMP files, which are equally long."""
    folder.mkdir(exist_ok=True)
    drawn = np.random.default_rng(seed).integers(0, 40 + 200 * seed, (8, 16, 16, 3))
    for index, pixels in enumerate(drawn):
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.bmp")


REAL: Mapping[str, Callable[[str], Evaluator]] = {
    "fid_real_scenes": lambda folder: FidReal(SPACE, statistics=folder),
    "cmmd": lambda folder: CmmdReal(SPACE, statistics=folder),
    "mind_real_scenes": lambda folder: MindReal(SPACE, statistics=folder),
    "precision_real_scenes": lambda folder: PrecisionRecallReal(SPACE, statistics=folder),
}


def replace_real(real: Path, other: Path) -> None:
    """Change the contents of images, and neither their sizes nor their times of modification."""
    draw_real(other, 1)
    for path in real.iterdir():
        times = path.stat()
        path.write_bytes((other / path.name).read_bytes())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("metric", REAL)
def test_every_metric_of_real_images_reads_their_contents(metric: str, tmp_path: Path) -> None:
    real = tmp_path / "real"
    draw_real(real, 0)
    before = hash_inputs(REAL[metric](str(real)), [], tmp_path)
    assert find_changes(before, hash_inputs(REAL[metric](str(real)), [], tmp_path)) == []
    replace_real(real, tmp_path / "other")
    assert find_changes(before, hash_inputs(REAL[metric](str(real)), [], tmp_path)) == ["statistics"]


def test_real_images_that_were_replaced_count(tmp_path: Path) -> None:
    real, metric = tmp_path / "real", "fid_real_scenes"
    draw_real(real, 0)
    evaluators = {"real": REAL[metric](str(real)), "psnr": Psnr()}
    first = execute.run(make_image_job(tmp_path / "runs", evaluators))
    assert execute.run(make_image_job(tmp_path / "runs", evaluators)).reused
    replace_real(real, tmp_path / "other")
    job = make_image_job(tmp_path / "runs", evaluators)
    second = execute.run(job)
    assert job.model.batches == []
    fresh = execute.run(make_image_job(tmp_path / "fresh", evaluators))
    assert value(second, metric) == value(fresh, metric) != value(first, metric)
    shutil.rmtree(real)
    assert execute.run(make_image_job(tmp_path / "runs", evaluators)).results == second.results
