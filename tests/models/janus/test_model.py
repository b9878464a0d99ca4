"""Janus-Pro as the harness sees it: shapes, official files, random weights, and every method on it."""

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from kvbench.core.files import hash_path
from kvbench.models.janus import model as janus
from kvbench.models.janus.model import JanusModel
from kvbench.models.weights import Source, WeightsError
from tests.support.reference import OneStream
from tests.support.reference_janus import (
    CONFIGS,
    SMALL,
    TINY_VQ,
    Numbers,
    golden,
    prompt_of,
    published,
    whole_state,
)
from tests.support.small_models import composed, full

PROMPTS = ["a red circle", "two blue rings and a dog"]


def model(*overrides: str) -> JanusModel:
    return instantiate(composed(*overrides).model)


@pytest.mark.parametrize(("size", "layers", "heads"), [("1b", 24, 16), ("7b", 30, 32)])
def test_published_shapes(size: str, layers: int, heads: int) -> None:
    one = model(f"model=janus_pro_{size}")
    spec = one.spec
    assert (spec.layers, spec.heads, spec.head_dim, spec.branches) == (layers, heads, 128, 2)
    assert spec.logit_scale == 128**-0.5
    assert [segment.length for segment in spec.segments] == [64, *[24] * 23, 23]
    assert one.transformer.eps == 1e-6
    used = ("language_model.model.", "gen_")
    shapes = {k: s for k, (s, _) in published()[f"pro_{size}"]["keys"].items() if k.startswith(used)}
    numbers = {key: math.prod(shape) for key, shape in shapes.items() if not key.endswith("codebook_used")}
    assert one.parameters == sum(numbers.values())
    assert {source.repo for source in one.sources.values()} == {f"deepseek-ai/Janus-Pro-{size.upper()}"}
    assert (one.compute_dtype("cpu"), one.compute_dtype("cuda")) == (torch.float32, torch.bfloat16)


def test_room_segments_and_guidance_are_settings() -> None:
    other = model("model=janus_pro_1b", "model.chunk=50", "model.prompt_tokens=20", "model.sampling.cfg=1")
    assert [one.length for one in other.spec.segments] == [20, *[50] * 11, 25]
    assert other.spec.branches == 1
    for name in ("chunk", "prompt_tokens"):
        with pytest.raises(Exception, match=re.escape(f"model.{name}=0: must be at least 1")):
            model("model=janus_pro_1b", f"model.{name}=0")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The reference model as an official file, with what only reads images; a text is token numbers."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    paths = {"weights": tmp_path / "pytorch_model.bin", "text": tmp_path / "tokenizer.json"}
    foreign = {"aligner.layers.0.weight": torch.zeros(2), "vision_model.pos_embed": torch.zeros(2)}
    torch.save(
        {**whole_state(), **foreign, "gen_vision_model.quantize.codebook_used": torch.zeros(9)},
        paths["weights"],
    )
    paths["text"].write_text("numbers")
    monkeypatch.setattr(janus, "read_tokenizer", lambda source, *_: (Numbers(), hash_path(source.locate())))
    return paths


def reading(files: dict[str, Path]) -> JanusModel:
    sources = {part: Source(f"model.sources.{part}", str(path)) for part, path in files.items()}
    sampling = replace(model("model=janus_pro_1b").sampling, cfg=2.0, temperature=0.7)
    return JanusModel("janus_golden", CONFIGS["mha"], TINY_VQ, sampling, sources, prompt_tokens=10)


def test_official_files_give_the_official_images(files: dict[str, Path]) -> None:
    one = reading(files)
    one.load("cpu")
    prompts = [prompt_of("mha", "sample_t07_cfg2")] * 3
    images = one.generate(prompts, full(one), OneStream(7, 3))
    expected = golden("mha")["sample_t07_cfg2.image_u8"]
    assert (
        images.int() - expected.int()
    ).abs().max() <= 1  # where float32 comes to lie across a whole number
    assert (images != expected).float().mean() < 1e-3
    digests = "".join(hash_path(files[part]) for part in ("weights", "text"))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()
    assert list(one.calls) == ["text", "transformer", "decode"]


def test_the_file_of_another_model_is_refused(files: dict[str, Path]) -> None:
    torch.save({"layers.0.attention.wqkv.weight": torch.zeros(2, 2)}, files["weights"])
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: the checkpoint does not fit"):
        reading(files).load("cpu")


@pytest.mark.parametrize(("size", "file"), [("1b", r"pytorch_model\.bin"), ("7b", "Janus-Pro-7B")])
def test_missing_weights_say_how_to_get_them(size: str, file: str) -> None:
    one = model(f"model=janus_pro_{size}")
    with pytest.raises(WeightsError, match=r"model\.sources\.text: weights missing.*tokenizer\.json"):
        one.check_prompts(PROMPTS)
    with pytest.raises(WeightsError, match=rf"model\.sources\.weights: weights missing.*{file}"):
        one.load("cpu")


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        Exception, match=re.escape("model.transformer.codes=128: model.tokenizer.codes is 64")
    ):
        model(*SMALL, "model.tokenizer.codes=64")
    with pytest.raises(ValueError, match="names no text and no weights; use"):
        replace(model(*SMALL), weights="files", sources={})
