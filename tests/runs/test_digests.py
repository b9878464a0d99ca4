"""All samples of a run are made by one calibration and one engine: others are drawn anew, never joined, and named."""

import json
import shutil
from pathlib import Path

import pytest

from kvbench.core import checkpoint
from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.methods.heatkv.method import HeatKV
from kvbench.runs import execute
from kvbench.runs.calls import recall, remember
from kvbench.runs.generate import blocks
from kvbench.runs.job import Job
from kvbench.runs.partial import begin, extend
from kvbench.runs.record.merge import merge_runs
from tests.support.fake_run import Fake, count_records, images_of, job_in

ENGINE = "1" * 64


@pytest.fixture(autouse=True)
def other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins under another engine than the program's."""
    monkeypatch.setattr(execute, "identify_engine", lambda: ENGINE)


def draw_part(job: Job, count: int) -> Path:
    """Draw the first samples of a run and of its reference."""
    run, reference = begin(job), begin(job.reference)
    extend(reference, range(count))
    extend(run, range(count), reference.folder.path)
    return run.folder.path


def change_numbers(path: Path) -> None:
    """Change the numbers of a calibration by a rounding error, as another number of threads does."""
    tensors, metadata = checkpoint.load(path)
    checkpoint.save(path, {name: one * (1 + 1e-12) for name, one in tensors.items()}, metadata)


def test_an_unfinished_run_of_another_engine_is_drawn_anew(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = draw_part(job_in(tmp_path), 4)
    monkeypatch.undo()
    model = Fake()
    outcome = execute.run(job_in(tmp_path, model=model))
    assert outcome.folder == folder
    assert model.batches == [2] * 10  # all ten, of the run and of its reference
    assert f"{folder.name}: 4 samples made by another engine, kernels or core (11111111, not" in caplog.text
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["engine_sha256"] == execute.identify_engine() != ENGINE
    assert images_of(folder) == images_of(whole)


def test_a_whole_run_of_another_engine_is_found_says_so_and_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = execute.run(job_in(tmp_path, 4)).folder
    monkeypatch.undo()
    caplog.set_level("INFO")
    job = job_in(tmp_path, 4)
    outcome = execute.run(job)
    assert (outcome.folder, outcome.reused, job.model.batches) == (folder, True, [])
    assert f"{folder.name}: found, made by another engine, kernels or core (11111111, not" in caplog.text
    remember(job, outcome)
    assert recall(tmp_path, job.config, job.method_name) is None  # or the line would be seen once
    longer = execute.run(job_in(tmp_path, 6)).folder
    assert "taken" not in json.loads((longer / "provenance.json").read_text())
    assert f"{longer.name}: takes nothing from {folder.name}, made by another engine" in caplog.text


def test_a_process_that_draws_is_not_robbed_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = draw_part(job_in(tmp_path), 4)
    monkeypatch.undo()
    with (
        claim(folder / ".block-4-6"),
        pytest.raises(ConfigError, match=r"another process generates it with other code or calibration"),
    ):
        begin(job_in(tmp_path))
    assert count_records(folder) == 4


def test_a_process_stops_where_another_started_the_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(job_in(tmp_path).reference)
    extend(run, range(2))
    monkeypatch.undo()
    begin(job_in(tmp_path).reference)
    read, seen = blocks.read_digests, []

    def read_late(folder: Path) -> object:
        seen.append(folder)  # the process read its digests before the run was started anew
        return {"engine_sha256": ENGINE} if len(seen) == 1 else read(folder)

    monkeypatch.setattr(blocks, "read_digests", read_late)
    with pytest.raises(ConfigError, match=r"restarted by a process with another engine"):
        extend(run, range(4))


@pytest.mark.parametrize("finished", [True, False])
def test_a_calibration_that_was_made_again_keeps_the_name(
    tmp_path: Path, finished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_in(tmp_path, method=HeatKV(sinks=1))
    folder = execute.run(job).folder if finished else draw_part(job, 4)
    [artifact] = (tmp_path / "fake").glob("calibration-*.safetensors")
    change_numbers(artifact)
    again = execute.run(job_in(tmp_path, method=HeatKV(sinks=1)))
    assert again.folder == folder
    assert again.reused == finished
    said = "found, made by" if finished else "4 samples made by"
    assert f"{folder.name}: {said} another calibration (" in caplog.text


def test_calibrations_of_two_machines_are_a_conflict_by_name(tmp_path: Path) -> None:
    ours = execute.run(job_in(tmp_path / "a", method=HeatKV(sinks=1))).folder
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    [artifact] = (tmp_path / "b/fake").glob("calibration-*.safetensors")
    change_numbers(artifact)
    for path in (tmp_path / "b/fake").glob("streaming_llm-*"):
        shutil.rmtree(path)
    theirs = execute.run(job_in(tmp_path / "b", method=HeatKV(sinks=1))).folder
    assert theirs.name == ours.name
    problems = {one.name: one.problem for one in merge_runs(tmp_path / "b", tmp_path / "a")}
    assert problems[f"fake/{artifact.name}"] == "differs from the existing calibration, which is kept"
    assert "was made by another calibration (" in str(problems[f"fake/{ours.name}"])
