"""Janus-Pro as the harness sees it: shapes, official files, random weights, and every method on it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.files import hash_path
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.janus import model as janus
from kvbench.models.janus.model import JanusModel
from tests.support.reference import OneStream
from tests.support.reference_janus import CONFIGS, TINY_VQ, golden, prompt_of, read_numbers, whole_state
from tests.support.small_models import configured, full


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
    monkeypatch.setattr(
        janus, "read_tokenizer", lambda source, *_: (read_numbers(), hash_path(source.locate()))
    )
    return paths


def reading(files: dict[str, Path]) -> JanusModel:
    sources = {part: Source(f"model.sources.{part}", str(path)) for part, path in files.items()}
    sampling = replace(configured("model=janus_pro_1b").sampling, cfg=2.0, temperature=0.7)
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


def test_another_number_in_config_json_is_refused(files: dict[str, Path]) -> None:
    config = files["weights"].with_name("config.json")
    config.write_text(json.dumps({"language_config": {"rms_norm_eps": 1e-5, "vocab_size": 5}}))
    with pytest.raises(
        WeightsError,
        match=r"config\.json: language_config\.vocab_size is 5, .*; language_config\.rms_norm_eps",
    ):
        reading(files).load("cpu")
