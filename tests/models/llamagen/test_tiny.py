"""The embedded next-token model: small, right in most pictures, the same in any batch, shard and after a kill."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from torch import Tensor

from kvbench.core.settings import Shard
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.headkv import HeadKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.noise import PromptNoise
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from kvbench.runs.job import Job
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import exact
from kvbench.scenes.grammar import evaluation_prompts
from tests.support.engine import open_cache
from tests.support.fake_run import images_of, job_in
from tests.support.marks import slow_but_every
from tests.support.places import ASSETS
from tests.support.small_models import configured

LINES = evaluation_prompts(18, seed=11)


@lru_cache
def tiny(rows: int = 16) -> LlamaGenModel:
    """The model; of fewer rows its weights draw a strip."""
    model = configured("model=llamagen_tiny")
    model = replace(model, transformer=replace(model.transformer, grid=(rows, 16)))
    model.load("cpu")
    return model


def draw(method: Method, chosen: list[int], rows: int = 16) -> Tensor:
    model, budget = tiny(rows), 1 if isinstance(method, Full) else 46
    cache = open_cache(method, model.spec, budget)
    cache.prompts = chosen
    prompts = [str(LINES[index]["prompt"]) for index in chosen]
    return model.generate(prompts, cache, PromptNoise(3, chosen))


def test_it_is_small_and_has_256_tokens() -> None:
    held = sum(path.stat().st_size for path in (ASSETS / "llamagen_tiny").glob("*.safetensors"))
    assert held <= 12e6
    assert tiny().spec.drawn_tokens == 256
    assert tiny().spec.lengths == (14, *[16] * 15, 15)


@pytest.mark.slow
def test_most_pictures_hold_exactly_what_the_caption_names() -> None:
    images = draw(Full(), list(range(18))).numpy()
    right = [exact(detect(image), line) for image, line in zip(images, LINES, strict=True)]
    assert sum(right) >= 16


@pytest.mark.parametrize(
    "method",
    slow_but_every(4, [HeadKV(sinks=1), Full(), SnapKV(sinks=1), StreamingLLM(sinks=1)]),
    ids=lambda method: type(method).__name__,
)
def test_a_picture_is_the_same_in_any_batch(method: Method) -> None:
    together = draw(method, [0, 1], rows=5)
    for index in range(2):
        alone = draw(method, [index], rows=5)[0]
        assert (alone.int() - together[index].int()).abs().max() <= 1
    assert (together[0].int() - together[1].int()).abs().max() > 50


def job(folder: Path, **changed: object) -> Job:
    """Strips of four rows."""
    prompts = [Prompt(index, str(line["prompt"]), line) for index, line in enumerate(LINES[:4])]
    settings = {"batch_size": 2, "budget": 30, **changed}
    return job_in(folder, model=tiny(4), method=HeadKV(sinks=1), prompts=prompts, **settings)


@pytest.mark.slow
def test_shards_and_a_killed_run_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = images_of(execute.run(job(tmp_path / "whole")).folder)
    assert len(whole) == 4
    for index in (1, 0):
        outcome = execute.run(job(tmp_path / "shards", shard=Shard(index, 2)))
    assert images_of(outcome.folder) == whole
    generate, calls = LlamaGenModel.generate, []

    def killed(self: LlamaGenModel, prompts: list[str], cache: KVCache, noise: PromptNoise) -> Tensor:
        calls.append(prompts)
        if len(calls) == 4:  # two batches of the reference, then the second one of the run
            raise KeyboardInterrupt
        return generate(self, prompts, cache, noise)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaGenModel, "generate", killed)
        with pytest.raises(KeyboardInterrupt):
            execute.run(job(tmp_path / "cut"))
    assert images_of(execute.run(job(tmp_path / "cut")).folder) == whole
