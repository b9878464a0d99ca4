"""Runs drawn block by block or with samples taken from others: the bytes of a run that drew them itself, at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from kvbench.runs.generate.retention import FILE as RETENTION
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.partial import begin, extend
from tests.support.fake_run import Fake, images_of, job_in

VARYING = ("seconds", "load")


def draw(root: Path, count: int = 10, **more: Any) -> tuple[Path, list[int]]:
    """Complete a run; return its folder and the sizes of the batches that it and its reference drew."""
    model = Fake()
    job = job_in(root, count, model=model, **more)
    outcome = execute.run(job)
    assert outcome.results is not None
    assert outcome.results.n == outcome.results.metrics["psnr"].n == len(job.prompts)
    return outcome.folder, model.batches


def read_lasting(folder: Path) -> list[dict[str, Any]]:
    """Records without times."""
    lines = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in VARYING} for line in lines]


def read_taken(folder: Path) -> dict[str, int]:
    return json.loads((folder / "provenance.json").read_text()).get("taken", {})


def test_more_prompts_keep_the_samples(tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = draw(tmp_path, 4)
    path = first / "provenance.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "earlier machine"}))
    with caplog.at_level("INFO"):
        folder, batches = draw(tmp_path, 10)
    assert batches == [2, 2, 2] * 2  # six of ten, of the run and of its reference
    assert images_of(folder) == images_of(whole)
    assert read_lasting(folder) == read_lasting(whole)
    assert (folder / RETENTION).read_bytes() == (whole / RETENTION).read_bytes()
    scores = [json.loads((path / "results.json").read_text())["metrics"] for path in (folder, whole)]
    assert scores[0] == scores[1]
    assert f"{folder.name}: took 4 of 10 samples from {first.name}" in caplog.messages
    assert read_taken(folder) == {first.name: 4}
    origins = json.loads((folder / "provenance.json").read_text())["resumed"]
    assert [one["machine"] for one in origins] == ["earlier machine"]
    assert folder.name == whole.name


def test_fewer_prompts_draw_nothing(tmp_path: Path, whole: Path) -> None:
    longer, _ = draw(tmp_path, 10)
    folder, batches = draw(tmp_path, 3)
    assert batches == []
    assert read_lasting(folder) == read_lasting(whole)[:3]
    assert read_taken(folder) == {longer.name: 3}
    assert images_of(longer) == images_of(whole)


def test_only_the_same_prompt_at_the_same_number_is_taken(tmp_path: Path, whole: Path) -> None:
    draw(tmp_path, 10)
    prompts = [Prompt(i, f"prompt {i}", {"number": i}) for i in range(10)]
    prompts[2:4] = [replace(prompts[2], text="another"), replace(prompts[3], meta={"number": "new"})]
    prompts[6], prompts[8] = replace(prompts[6], text="prompt 8"), replace(prompts[8], text="prompt 6")
    folder, _ = draw(tmp_path, prompts=prompts)
    assert list(read_taken(folder).values()) == [7]
    ours, theirs = images_of(folder), images_of(whole)
    assert [int(name[:6]) for name in ours if ours[name] != theirs[name]] == [2, 6, 8]
    records = read_lasting(folder)
    assert [record["prompt"] for record in records] == [prompt.text for prompt in prompts]
    assert records[3]["meta"] == {"number": "new"}


def test_runs_that_differ_in_more_are_left_alone(tmp_path: Path) -> None:
    draw(tmp_path, 4)
    for more in ({"seed": 1}, {"method": StreamingLLM(sinks=2)}):
        assert read_taken(draw(tmp_path, 4, **more)[0]) == {}


def test_an_interrupted_run_gives_what_it_has(tmp_path: Path, whole: Path) -> None:
    first, _ = draw(tmp_path, 6)
    lines = (first / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (first / "results.json").unlink()
    (first / "samples.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:20])
    (first / "images/000003.png").write_bytes(b"damaged")
    folder, _ = draw(tmp_path, 10)
    assert read_taken(folder) == {first.name: 4}
    assert images_of(folder) == images_of(whole)


@pytest.mark.parametrize("damage", ["samples.jsonl", RETENTION])
def test_a_damaged_run_is_no_obstacle(tmp_path: Path, whole: Path, damage: str) -> None:
    first, _ = draw(tmp_path, 4)
    (first / damage).write_text("{\n")
    folder, _ = draw(tmp_path, 10)
    assert read_taken(folder) == {}
    assert images_of(folder) == images_of(whole)


def test_the_first_batch_is_drawn_where_its_retention_is_of_other_prompts(tmp_path: Path) -> None:
    longer, _ = draw(tmp_path, 10, batch_size=5)
    folder, batches = draw(tmp_path, 3, batch_size=3)
    assert batches == [3, 3]
    retention = read_retention(folder)
    assert retention is not None
    assert retention.prompts == 3
    assert read_taken(draw(tmp_path, 7)[0]) == {longer.name: 7}


def test_runs_of_other_folders_are_used(tmp_path: Path, whole: Path) -> None:
    draw(tmp_path / "theirs", 4)
    job = job_in(tmp_path / "ours", 10)
    job = replace(job, settings=replace(job.settings, runs_dirs=(str(tmp_path / "theirs"),)))
    folder = execute.run(job).folder
    assert list(read_taken(folder).values()) == [4]
    assert images_of(folder) == images_of(whole)


def test_blocks_are_drawn_as_far_as_needed_and_equal_a_whole_run(tmp_path: Path, whole: Path) -> None:
    job = job_in(tmp_path, 10)
    run, reference = begin(job), begin(job.reference)
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
