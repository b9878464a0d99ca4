"""Lumina-mGPT as the harness sees it: shapes, official files, random weights, and every method on it."""

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file

from kvbench.core.files import hash_path
from kvbench.models.lumina import model as lumina
from kvbench.models.lumina.model import LuminaModel
from kvbench.models.weights import Source, WeightsError
from tests.support.reference import OneStream
from tests.support.reference_lumina import (
    CONFIGS,
    SMALL,
    TINY_VQ,
    Numbers,
    golden,
    official_state,
    prompt_of,
    published,
)
from tests.support.small_models import composed, full

PROMPTS = ["a red circle", "two blue rings and a dog"]


def model(*overrides: str) -> LuminaModel:
    return instantiate(composed(*overrides).model)


@pytest.mark.parametrize(("pixels", "tokens"), [(512, 1056), (768, 2352), (1024, 4160)])
def test_published_shapes(pixels: int, tokens: int) -> None:
    one = model(f"model=lumina_mgpt_7b_{pixels}")
    spec, side = one.spec, pixels // 16
    assert (spec.layers, spec.heads, spec.head_dim, spec.branches) == (32, 32, 128, 2)
    assert spec.logit_scale == 128**-0.5
    assert not spec.equal_branches
    assert one.transformer.tokens == tokens
    assert [segment.length for segment in spec.segments] == [64, *[side + 1] * (side - 1), side]
    assert one.transformer.eps == 1e-5
    numbers = [math.prod(shape) for shape, _ in published()["language"]["keys"].values()]
    more = 32 * 4 * 31 * 128  # every head has its own norm here, where the file has one for all
    assert one.parameters == sum(numbers) + more + published()["tokenizer"]["parameters"]
    repos = {part: source.repo for part, source in one.sources.items()}
    released = f"Alpha-VLLM/Lumina-mGPT-7B-{pixels}"
    assert repos == {"weights": released, "tokenizer": None, "text": released}
    assert (one.compute_dtype("cpu"), one.compute_dtype("cuda")) == (torch.float32, torch.bfloat16)
    assert (one.sampling.cfg, one.sampling.top_k, one.sampling.temperature) == (4.0, 2000, 1.0)


def test_room_segments_and_guidance_are_settings() -> None:
    name = "model=lumina_mgpt_7b_768"
    other = model(name, "model.chunk=500", "model.prompt_tokens=20", "model.sampling.cfg=1")
    assert [one.length for one in other.spec.segments] == [20, *[500] * 4, 351]
    assert other.spec.branches == 1
    assert other.spec.equal_branches
    for key in ("chunk", "prompt_tokens"):
        with pytest.raises(Exception, match=re.escape(f"model.{key}=0: must be at least 1")):
            model(name, f"model.{key}=0")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The reference models as official files, with what only training needs; a text is token numbers."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    paths = {
        "weights": tmp_path / "model.safetensors",
        "tokenizer": tmp_path / "vqgan.ckpt",
        "text": tmp_path / "tokenizer.json",
    }
    save_file(official_state("lm"), paths["weights"])
    training = {"loss.logvar": torch.zeros(2), "encoder.conv_in.bias": torch.zeros(2)}
    torch.save({"state_dict": {**official_state("vqgan"), **training}, "epoch": 3}, paths["tokenizer"])
    paths["text"].write_text("numbers")
    monkeypatch.setattr(lumina, "read_tokenizer", lambda source, *_: (Numbers(), hash_path(source.locate())))
    return paths


def reading(files: dict[str, Path]) -> LuminaModel:
    sources = {part: Source(f"model.sources.{part}", str(path)) for part, path in files.items()}
    sampling = replace(model("model=lumina_mgpt_7b_768").sampling, cfg=2.0, top_k=50, temperature=0.9)
    return LuminaModel("lumina_golden", CONFIGS["lm"], TINY_VQ, sampling, sources, prompt_tokens=12)


def test_official_files_give_the_official_images(files: dict[str, Path]) -> None:
    one = reading(files)
    one.load("cpu")
    prompts = [prompt_of("sample_cfg2_k50_t09")]
    images = one.generate(prompts, full(one), OneStream(7, 1))
    expected = golden()["sample_cfg2_k50_t09.image_u8"]
    # Where float32 comes to lie across a whole number.
    assert (images[0].int() - expected.int()).abs().max() <= 1
    assert (images[0] != expected).float().mean() < 1e-2
    digests = "".join(hash_path(files[part]) for part in ("weights", "tokenizer", "text"))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()
    assert list(one.calls) == ["text", "transformer", "decode"]


def test_the_files_of_another_model_are_refused(files: dict[str, Path]) -> None:
    save_file({"layers.0.attention.wqkv.weight": torch.zeros(2, 2)}, files["weights"])
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: the checkpoint does not fit"):
        reading(files).load("cpu")
    save_file(official_state("lm"), files["weights"])
    torch.save({"decoder.conv_in.weight": torch.zeros(2, 2)}, files["tokenizer"])
    with pytest.raises(WeightsError, match=r"model\.sources\.tokenizer: the checkpoint does not fit"):
        reading(files).load("cpu")


def test_missing_weights_say_how_to_get_them(files: dict[str, Path]) -> None:
    one = model("model=lumina_mgpt_7b_1024")
    with pytest.raises(
        WeightsError, match=r"model\.sources\.text: weights missing.*tokenizer\.json.*revision"
    ):
        one.check_prompts(PROMPTS)
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: weights missing.*revision"):
        one.load("cpu")
    half = replace(reading(files), sources=reading(files).sources | {"tokenizer": one.sources["tokenizer"]})
    key = "model.sources.tokenizer"
    message = f"{key}: weights missing. Give a local copy of vqgan.ckpt with {key}.path=..."
    with pytest.raises(WeightsError, match=f"^{re.escape(message)}$"):
        half.load("cpu")


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        Exception, match=re.escape("model.transformer.codes=128: model.tokenizer.codes is 64")
    ):
        model(*SMALL, "model.tokenizer.codes=64")
    with pytest.raises(ValueError, match="names no text and no tokenizer and no weights; use"):
        replace(model(*SMALL), weights="files", sources={})
