"""Emu3 as the harness sees it: files in the layout of transformers, and settings that do not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbench.models.emu3.model import Emu3Model
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from tests.support.reference import OneStream
from tests.support.reference_emu3 import (
    CONFIG,
    NEGATIVE,
    SMALL,
    SUFFIX,
    TINY_VQ,
    golden,
    meta,
    official_state,
    write_tokenizer,
)
from tests.support.small_models import configured, full

pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as transformers writes it."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    save_file(official_state(), tmp_path / "model.safetensors")
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def reading(folder: Path) -> Emu3Model:
    sources = {
        "weights": Source("model.sources.weights", str(folder)),
        "text": Source("model.sources.text", str(folder / "tokenizer.json")),
    }
    sampling = replace(configured("model=emu3_gen").sampling, top_k=20)
    more = {"suffix": SUFFIX, "negative": NEGATIVE, "prompt_tokens": 40}
    return Emu3Model("emu3_golden", CONFIG, TINY_VQ, sampling, sources, rounding="truncate", **more)


def test_files_of_transformers_give_its_images(folder: Path) -> None:
    one = reading(folder)
    one.load("cpu")
    given = meta()["cases"]["sampled"]
    images = one.generate(["a red cube"] * 2, full(one), OneStream(given["seed"], 2))
    expected = golden()["sampled.image_u8"].reshape(images.shape)
    assert (images.int() - expected.int()).abs().max() <= 1  # where float32 is next to a whole number
    assert (images != expected).float().mean() < 1e-2
    assert list(one.calls) == ["text", "transformer", "decode"]


def test_the_files_of_another_model_are_refused(folder: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: the checkpoint does not fit"):
        reading(folder).load("cpu")


def test_another_number_in_config_json_is_refused(folder: Path) -> None:
    text = {"rope_theta": 10000.0, "vocab_size": 5, "rope_scaling": {"rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    message = r"config\.json: text_config\.vocab_size is 5, .*; text_config\.rope_theta is 10000\.0, [^;]*; set [^;]*$"
    with pytest.raises(WeightsError, match=message):
        reading(folder).load("cpu")


def test_an_unconditional_prompt_that_is_too_long_is_refused() -> None:
    long = configured(*SMALL, "model.negative='one two three four five six seven eight'")
    message = (
        r"^model\.negative='one .* has 13 tokens with its frame: set model\.prompt_tokens=13, which is 12"
    )
    for ask in (lambda: long.check_prompts(["a red circle"]), lambda: long.load("cpu")):
        with pytest.raises(ValueError, match=message):
            ask()
    replace(long, sampling=replace(long.sampling, cfg=1.0)).check_prompts(["a red circle"])


def test_the_suffix_is_part_of_every_prompt() -> None:
    one = configured(*SMALL, "model.suffix=' and a dog'")
    whole = configured(*SMALL)
    one.load("cpu")
    whole.load("cpu")
    assert one._text.encode("a red circle") == whole._text.encode("a red circle and a dog")
