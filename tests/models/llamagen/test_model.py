"""LlamaGen as the harness sees it: prompts, shapes, official files, random weights, and every method on it."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.files import hash_path
from kvbench.engine.cache import KVCache
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.noise import PromptNoise
from kvbench.models.weights import Source, WeightsError
from tests.support.methods import methods_for
from tests.support.reference import OneStream
from tests.support.reference_llamagen import CONFIGS, TINY_VQ, golden, official_state
from tests.support.small_models import composed, full, ready

SMALL = (
    "model=llamagen_b",
    "model.weights=random",
    "model.transformer.depth=2",
    "model.transformer.width=32",
    "model.transformer.heads=2",
    "model.transformer.kv_heads=2",
    "model.transformer.head_dim=16",
    "model.transformer.hidden=64",
    "model.transformer.vocabulary=128",
    "model.transformer.grid=[5,6]",
    "model.transformer.classes=10",
    "model.tokenizer.codes=128",
    "model.tokenizer.latents=16",
    "model.tokenizer.widths=[32,32,64]",
    "model.tokenizer.blocks=1",
)


def model(*overrides: str) -> LlamaGenModel:
    return instantiate(composed(*overrides).model)


@pytest.fixture(scope="module")
def tiny() -> LlamaGenModel:
    one = model(*SMALL)
    one.load("cpu")
    return one


@pytest.mark.parametrize(
    ("name", "layers", "heads", "head_dim", "parameters"),
    [
        ("b", 12, 12, 64, 110_888_448),
        ("l", 24, 16, 64, 342_910_976),
        ("xl", 36, 20, 64, 774_699_520),
        ("xxl", 48, 24, 64, 1_410_972_672),
        ("3b", 24, 32, 100, 3_096_659_200),
    ],
)
def test_published_shapes(name: str, layers: int, heads: int, head_dim: int, parameters: int) -> None:
    one = model(f"model=llamagen_{name}")
    spec = one.spec
    assert one.parameters == parameters + 71_883_403
    assert (spec.layers, spec.heads, spec.head_dim, spec.branches) == (layers, heads, head_dim, 2)
    assert spec.logit_scale == head_dim**-0.5
    assert (spec.segments[0].length, spec.ends[-1], len(spec.segments)) == (1, 576, 25)
    assert one.sources["transformer"].file == f"c2i_{name.upper()}_384.pt"
    assert one.sources["tokenizer"].file == "vq_ds16_c2i.pt"
    assert {source.repo for source in one.sources.values()} == {"FoundationVision/LlamaGen"}
    assert (one.compute_dtype("cpu"), one.compute_dtype("cuda")) == (torch.float32, torch.bfloat16)


def test_segments_and_guidance_are_settings() -> None:
    chunked = model("model=llamagen_b", "model.chunk=50", "model.sampling.cfg=1")
    assert [one.length for one in chunked.spec.segments] == [1, *[50] * 11, 25]
    assert chunked.spec.branches == 1
    with pytest.raises(Exception, match=re.escape("model.chunk=0: must be at least 1")):
        model("model=llamagen_b", "model.chunk=0")


def test_images_depend_on_class_and_noise_and_on_nothing_else(tiny: LlamaGenModel) -> None:
    def images(prompts: list[str], seed: int) -> Tensor:
        return tiny.generate(prompts, full(tiny), PromptNoise(seed, range(len(prompts))))

    first = images(["3", "7 tench"], 0)
    assert (first.shape, first.dtype) == ((2, 20, 24, 3), torch.uint8)
    again = model(*SMALL)
    again.load("cpu")
    assert again.weights_sha256 == tiny.weights_sha256
    assert torch.equal(again.generate(["3", "7"], full(again), PromptNoise(0, range(2))), first)
    assert not torch.equal(images(["4", "7"], 0)[0], first[0])
    assert not torch.equal(images(["3", "7"], 1)[0], first[0])
    alone = tiny.generate(["7"], full(tiny), PromptNoise(0, (1,)))
    assert (alone[0].int() - first[1].int()).abs().max() <= 1
    assert 20 < first.float().std() < 100


@pytest.mark.parametrize("prompt", ["", "10", "-2", "3x", "a red circle"])
def test_other_prompts_are_refused_by_name(tiny: LlamaGenModel, prompt: str) -> None:
    message = re.escape(f"prompt {prompt!r}: llamagen_b wants a class number from 0 to 9")
    with pytest.raises(ValueError, match=message):
        tiny.check_prompts(["3", prompt])
    with pytest.raises(ValueError, match=message):
        tiny.generate([prompt], full(tiny), PromptNoise(0, (0,)))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The reference models as official files: the transformer with a table, the tokenizer nested."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    paths = {part: tmp_path / f"{part}.pt" for part in ("transformer", "tokenizer")}
    torch.save({**official_state("c2i_tiny"), "freqs_cis": torch.zeros(37, 8, 2)}, paths["transformer"])
    book = {**official_state("vq_tiny"), "quantize.codebook_used": torch.zeros(65536)}
    torch.save({"model": book, "steps": 7}, paths["tokenizer"])
    return paths


def reading(files: dict[str, Path], **swapped: str) -> LlamaGenModel:
    sources = {part: Source(f"model.sources.{part}", str(files[swapped.get(part, part)])) for part in files}
    sampling = replace(model("model=llamagen_b").sampling, cfg=3.0, temperature=0.9, top_k=40, top_p=0.95)
    return LlamaGenModel("llamagen_golden", CONFIGS["c2i"], TINY_VQ, sampling, sources)


def test_official_files_give_the_official_images(files: dict[str, Path]) -> None:
    one = reading(files)
    one.load("cpu")
    prompts = [str(label) for label in golden("c2i")["cond"].tolist()]
    images = one.generate(prompts, full(one), OneStream(1, 2))
    expected = (golden("c2i")["sampled.img"] * 127.5 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (images.int() - expected.int()).abs().max() <= 1  # where float32 comes to lie across a half
    assert (images != expected).float().mean() < 1e-3
    digests = "".join(hash_path(files[part]) for part in ("transformer", "tokenizer"))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()


@pytest.mark.parametrize("part", ["transformer", "tokenizer"])
def test_swapped_files_are_refused(files: dict[str, Path], part: str) -> None:
    other = {"transformer": "tokenizer", "tokenizer": "transformer"}[part]
    with pytest.raises(WeightsError, match=rf"model\.sources\.{part}: the checkpoint does not fit"):
        reading(files, **{part: other}).load("cpu")


def test_missing_weights_say_how_to_get_them() -> None:
    with pytest.raises(WeightsError, match=r"model\.sources\.transformer: weights missing.*c2i_XL_384\.pt"):
        model("model=llamagen_xl").load("cpu")


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        Exception, match=re.escape("model.transformer.vocabulary=128: model.tokenizer.codes is 64")
    ):
        model(*SMALL, "model.tokenizer.codes=64")
    one = model(*SMALL)
    with pytest.raises(ValueError, match="names no tokenizer and no transformer; use"):
        replace(one, weights="files", sources={})


METHODS = methods_for("next-token")


def test_methods_for_scales_are_left_out() -> None:
    assert {"linear_ar", "headkv", "diagonal", "h2o", "snapkv", "rkv", "random", "heatkv"} <= set(METHODS)
    assert not {"scalekv", "hack", "hackpp", "ams_kv", "ams_kv_fixed", "scale_groups"} & set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_draws_images(tiny: LlamaGenModel, name: str) -> None:
    method = ready(name, tiny, "1" if name == "full" else "0.4", SMALL)
    cache = KVCache(tiny.spec, method, dtype=torch.float32)
    images = tiny.generate(["3", "7"], cache, PromptNoise(0, (0, 1)))
    assert images.shape == (2, 20, 24, 3)
    if method.strict and name != "full":
        capacity = Budget.parse("0.4", tiny.spec).capacity
        assert 0.4 * capacity < cache.ledger.peak_tokens <= max(capacity, method.budget.capacity)
        reference = tiny.generate(["3", "7"], full(tiny), PromptNoise(0, (0, 1)))
        assert not torch.equal(images, reference)


@pytest.mark.parametrize("name", METHODS)
def test_with_room_for_everything_every_method_draws_the_reference(tiny: LlamaGenModel, name: str) -> None:
    method = ready(name, tiny, "1", SMALL)
    cache = KVCache(tiny.spec, method, dtype=torch.float32)
    images = tiny.generate(["3", "7"], cache, PromptNoise(0, (0, 1)))
    if cache.ledger.peak_tokens == tiny.spec.full_tokens:
        reference = tiny.generate(["3", "7"], full(tiny), PromptNoise(0, (0, 1)))
        assert (images.int() - reference.int()).abs().max() <= 1
    else:
        assert not method.strict
