"""Lumina-mGPT as the harness sees it: shapes, official files, random weights, and every method on it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbench.core.files import hash_path
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.lumina import model as lumina
from kvbench.models.lumina.model import LuminaModel
from tests.support.reference import OneStream
from tests.support.reference_lumina import CONFIGS, TINY_VQ, golden, official_state, prompt_of, read_numbers
from tests.support.small_models import configured, full


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
    monkeypatch.setattr(
        lumina, "read_tokenizer", lambda source, *_: (read_numbers(), hash_path(source.locate()))
    )
    return paths


def reading(files: dict[str, Path]) -> LuminaModel:
    sources = {part: Source(f"model.sources.{part}", str(path)) for part, path in files.items()}
    sampling = replace(configured("model=lumina_mgpt_7b_768").sampling, cfg=2.0, top_k=50, temperature=0.9)
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


def test_another_number_in_config_json_is_refused(files: dict[str, Path]) -> None:
    config = files["weights"].with_name("config.json")
    config.write_text(json.dumps({"rope_theta": 1e6, "swin_norm": True}))
    with pytest.raises(WeightsError, match=r"config\.json: rope_theta is 1000000\.0, .*; swin_norm is True"):
        reading(files).load("cpu")
