"""A run of a language model keeps texts: one file each, resumed, shared and scored as images are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.eval.files.kinds import open_samples
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.files.texts import TextSet
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.text.length import TextLength
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs import execute
from kvbench.runs.job import Job
from kvbench.runs.record.results import read_results
from tests.support.fake_run import job_in
from tests.support.run_folders import read_files
from tests.support.small_models import small_writer


def job(root: Path, **more: object) -> Job:
    scorers = {"text_length": TextLength(), "psnr": Psnr()}
    return job_in(root, model=small_writer(20), method=StreamingLLM(sinks=1), evaluators=scorers, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcome = execute.run(job(tmp_path_factory.mktemp("whole")))
    assert outcome.results is not None
    return outcome.folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_leaves_texts(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert sorted(read_files(whole / "texts")) == [f"{index:06d}.txt" for index in range(10)]
    assert not (whole / "images").exists()
    assert not (whole / "contact_sheet.png").exists()
    for record, text in zip(records(whole), sorted(read_files(whole / "texts").items()), strict=True):
        words = text[1].decode().split()
        assert len(words) == record["tokens"] - record["ended"]
        assert record["ended"] == (record["tokens"] < 20)
    assert {record["ended"] for record in records(whole)} == {True, False}
    drawn, seconds = (sum(record[key] for record in records(whole)) for key in ("tokens", "seconds"))
    assert results["latency"]["tokens_per_second"] == pytest.approx(drawn / seconds, rel=1e-3)
    assert results["metrics"]["generated_tokens"]["n"] == 10
    psnr = results["metrics"]["psnr"]
    assert (psnr["status"], psnr["reason"]) == ("skipped", "it scores images, and these are texts")
    memory = results["memory"]
    assert 0 < memory["peak_tokens"] <= memory["budget_tokens"]
    assert memory["least_share"] > 0.5
    assert memory["last_tokens"] > 0


def test_what_drops_did_to_lse_is_recorded_where_it_is_watched(tmp_path: Path, whole: Path) -> None:
    watching = HardKV(queries=4, window=2, start=0.0, p=0.5, watch_lse=True)
    outcome = execute.run(replace(job(tmp_path), method=watching))
    drifts: list[float] = [record["lse_drift"] for record in records(outcome.folder)]
    assert outcome.results.memory.lse_drift == min(drifts) < 0
    for record in records(outcome.folder):
        segments = -(-record["tokens"] // 4)  # of 4 tokens; the last of a text is not fed back
        assert [step["tokens"] for step in record["steps"]] == [4 * (1 + n) for n in range(min(segments, 5))]
        assert record["longest"] == max(step["longest"] for step in record["steps"])
    steps = outcome.results.steps
    assert [step.n for step in steps] == [
        sum(len(record["steps"]) > k for record in records(outcome.folder)) for k in range(len(steps))
    ]
    own = [record["steps"][1]["lse"] for record in records(outcome.folder) if len(record["steps"]) > 1]
    assert steps[1].lse == pytest.approx(sum(own) / len(own))
    assert outcome.results == read_results(outcome.folder)
    assert all("lse_drift" not in record and "steps" not in record for record in records(whole))
    assert json.loads((whole / "results.json").read_text())["memory"]["lse_drift"] is None


def test_a_finished_run_is_reused_and_a_lost_text_written_again(whole: Path, tmp_path: Path) -> None:
    assert execute.run(job(whole.parents[1])).reused
    before, lines = read_files(whole / "texts"), records(whole)
    (whole / "texts" / "000003.txt").unlink()
    (whole / "texts" / "000007.txt").write_bytes(b"other")
    assert execute.run(job(whole.parents[1])).results is not None
    assert read_files(whole / "texts") == before
    ours, theirs = (
        [{key: value for key, value in line.items() if key not in ("seconds", "load")} for line in side]
        for side in (lines, records(whole))
    )
    assert ours == theirs


def test_batches_write_the_same(whole: Path, tmp_path: Path) -> None:
    other = execute.run(job(tmp_path / "more", batch_size=5)).folder
    assert read_files(other / "texts") == read_files(whole / "texts")


def test_texts_that_are_not_those_recorded_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    texts, path = open_samples(folder), folder / "texts" / "000001.txt"
    assert isinstance(texts, TextSet)
    assert [text for _, text in texts.read("")] == [
        one.decode() for one in read_files(folder / "texts").values()
    ]
    path.write_bytes(b"other")
    with pytest.raises(SampleSetError, match=r"000001\.txt is not the recorded file"):
        open_samples(folder)
    path.unlink()
    with pytest.raises(SampleSetError, match=r"missing texts of samples\.jsonl: 000001\.txt"):
        open_samples(folder)
    shutil.copy(whole / "texts" / path.name, path)
    lines = records(folder)
    lines[2].pop("tokens")
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SampleSetError, match="sample 2 has no `tokens`"):
        open_samples(folder)
