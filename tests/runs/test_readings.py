"""Runs that read texts: files, the full cache's states in the reference alone, resumption, damage."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvbench.core import checkpoint
from kvbench.core.config import ConfigError
from kvbench.core.settings import Shard
from kvbench.eval.files.kinds import open_samples
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.text.forced import Kl, Perplexity, SameTop1
from kvbench.forced.text import OWN_OUTPUT, ForcedText, Part
from kvbench.methods.h2o import H2O
from kvbench.methods.pricekv.method import PriceKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from kvbench.runs.generate.batch import open_cache
from kvbench.runs.job import Job, read_or_write
from kvbench.runs.prepare import _choose_batch_size
from tests.support.fake_run import job_in, open_folder
from tests.support.run_folders import read_files
from tests.support.small_models import small_writer

EVALUATORS = {"kl": Kl(), "same_top1": SameTop1(), "perplexity": Perplexity()}
COUNT = 6


def list_prompts(count: int = COUNT, first: int = 0) -> list[Prompt]:
    texts = [" ".join(f"{number}.{word}" for word in range(30)) for number in range(first, first + count)]
    return [
        Prompt(number, text, {}, "", ForcedText((Part(text, 24),), given=10))
        for number, text in enumerate(texts)
    ]


def job(root: Path, prompts: list[Prompt] | None = None, **more: object) -> Job:
    prompts = list_prompts() if prompts is None else prompts
    others = list_prompts(2, 100)
    return job_in(
        root,
        model=read_or_write(small_writer(20), prompts, others),
        prompts=prompts,
        calibration_prompts=others,
        **{"method": StreamingLLM(sinks=1), "evaluators": EVALUATORS, "budget": 6} | more,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcome = execute.run(job(tmp_path_factory.mktemp("whole")))
    assert outcome.results is not None
    return outcome.folder


def find_reference(folder: Path) -> Path:
    return folder.with_name(json.loads((folder / "results.json").read_text())["reference"])


def test_a_run_leaves_its_predictions_and_its_reference_the_states_too(whole: Path) -> None:
    ours, full = open_samples(whole), open_samples(find_reference(whole))
    assert isinstance(ours, ReadingSet)
    assert isinstance(full, ReadingSet)
    assert len(ours) == COUNT
    for index, reading in ours.readings():
        other = full.reading(index)
        assert reading.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(reading.nll_full, other.nll_full, rtol=1e-5)
        assert reading.likeliest_full.tolist() == other.likeliest_full.tolist()
        assert reading.kl.max() > 1e-6
        assert (other.kl == 0).all()
        assert len(reading.tokens) == 14
        assert {*reading.tokens.tolist(), *reading.likeliest.tolist()} <= reading.words.keys()
    name = "000000.safetensors"
    assert "states" not in load_file(whole / "readings" / name)
    assert load_file(find_reference(whole) / "readings" / name)["states"].shape == (14, 16)


def test_a_method_is_calibrated_on_texts_that_are_read(tmp_path: Path) -> None:
    """The calibration is of the texts' schedule, not of the model's own."""
    one = job(tmp_path, method=PriceKV(base=H2O(sinks=0), floor=1))
    one = replace(one, config={**one.config, "method": {"_target_": "PriceKV"}})
    assert execute.run(one).results is not None
    [path] = one.settings.runs_dir.rglob("calibration-*.safetensors")
    _, metadata = checkpoint.load(path)
    assert metadata["sizes"] == [[1, length] for length in (2, 4, 4, 4, 4, 4, 1)]


@pytest.mark.parametrize(("reading", "batch"), [(None, 1), (OWN_OUTPUT, 1), ("given", 2)])
def test_written_texts_are_calibrated_one_by_one(tmp_path: Path, reading: object, batch: int) -> None:
    """They end at different lengths; given texts do not."""
    prompts = list_prompts()
    if reading != "given":
        prompts = [replace(prompt, text=f"a{prompt.index} b c", reading=reading) for prompt in prompts]
    one = job(tmp_path, prompts, method=PriceKV(base=H2O(sinks=0), floor=1))
    one = replace(one, calibration_prompts=prompts[:2])
    assert _choose_batch_size(one) == batch


def test_shards_and_batches_read_the_same_and_a_lost_reading_is_read_again(
    whole: Path, tmp_path: Path
) -> None:
    for shard in (1, 0, 1):
        folder = execute.run(job(tmp_path, shard=Shard(shard, 2))).folder
    assert folder.name == whole.name
    assert read_files(folder / "readings") == read_files(whole / "readings")
    (folder / "readings" / "000003.safetensors").write_bytes(b"cut")
    execute.run(job(tmp_path))
    assert read_files(folder / "readings") == read_files(whole / "readings")
    one = execute.run(job(tmp_path / "one", batch_size=1))
    assert one.folder.name == whole.name
    for ours, theirs in zip(open_samples(one.folder).readings(), open_samples(whole).readings(), strict=True):
        np.testing.assert_allclose(ours[1].kl, theirs[1].kl, rtol=1e-3, atol=1e-6)


def test_given_makes_another_run(whole: Path, tmp_path: Path) -> None:
    prompts = list_prompts()
    others = [replace(one, reading=replace(one.reading, given=11)) for one in prompts]
    jobs = [job(tmp_path, one) for one in (prompts, others)]
    for one in jobs:
        execute.load(one)
    assert [open_folder(one).path.name == whole.name for one in jobs] == [True, False]


def test_a_damaged_reading_of_the_full_cache_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole.parents[1], tmp_path / "runs")
    one = job(tmp_path / "runs", method=StreamingLLM(sinks=0), budget=5)
    execute.load(one)
    one.method.prepare(one.cache_plan.spec, one.budget)
    folder = tmp_path / "runs" / whole.parent.name / whole.name
    full = find_reference(folder) / "readings" / "000000.safetensors"
    stored = load_file(full)
    for damage, message in ((b"cut", "not a record of the full cache"), (None, "belongs to another text")):
        if damage is None:
            save_file({**stored, "states": stored["states"][:3]}, full)
        else:
            full.write_bytes(damage)
        with pytest.raises(ConfigError, match=message):
            one.model.score([one.prompts[0].text], open_cache(one), None, [full])


def test_a_model_reads_what_it_wrote(tmp_path: Path) -> None:
    prompts = [Prompt(number, f"a{number} b c", {}, "", OWN_OUTPUT) for number in range(10)]
    one = job(tmp_path / "own", prompts)
    outcome = execute.run(one)
    plain = [Prompt(prompt.index, prompt.text) for prompt in prompts]
    written = execute.run(job(tmp_path / "plain", plain, evaluators={}).reference)
    texts = open_samples(written.folder)
    for index, reading in open_samples(outcome.folder).readings():
        text = "".join(f"{word} " for word in texts.text(index).split())
        assert "".join(f"{word} " for word in map(reading.words.get, reading.tokens.tolist()) if word) == text
        assert len(reading.tokens) == texts.samples[index].tokens
    assert len({len(reading.tokens) for _, reading in open_samples(outcome.folder).readings()}) > 1
