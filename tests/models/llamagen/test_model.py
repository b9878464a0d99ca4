"""LlamaGen as the harness sees it: official files and their images, by class and by caption."""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.files import hash_path
from kvbench.models.base import TextFeatures
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.llamagen import model as llamagen
from kvbench.models.llamagen.model import LlamaGenModel
from tests.support.reference import OneStream
from tests.support.reference_llamagen import CONFIGS, TINY_VQ, golden, official_state
from tests.support.small_models import configured, full


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
    sampling = replace(
        configured("model=llamagen_b").sampling, cfg=3.0, temperature=0.9, top_k=40, top_p=0.95
    )
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


class Encoded:
    """In place of Flan-T5: the reference run's features of two captions."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        self.asked += prompts
        lengths = tuple(golden("t2i")["t5_mask"].sum(1).tolist())
        rows = [row[:length] for row, length in zip(golden("t2i")["t5_emb"], lengths, strict=True)]
        return TextFeatures(torch.cat(rows), lengths)


@pytest.fixture
def caption_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The reference model as official files, and a file in place of Flan-T5's."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    paths = {part: tmp_path / f"{part}.pt" for part in ("transformer", "tokenizer", "text")}
    torch.save({"model": official_state("t2i_tiny")}, paths["transformer"])
    torch.save({"model": official_state("vq_tiny")}, paths["tokenizer"])
    paths["text"].write_text("features")
    return paths


def reading_captions(caption_files: dict[str, Path]) -> LlamaGenModel:
    sources = {part: Source(f"model.sources.{part}", str(path)) for part, path in caption_files.items()}
    sampling = replace(configured("model=llamagen_xl_t2i").sampling, top_k=50)
    return LlamaGenModel("llamagen_golden", CONFIGS["t2i"], TINY_VQ, sampling, sources, text="t5")


def test_caption_files_give_images(caption_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ftfy")
    encoder, given = Encoded(), []

    def load(source: Source, *settings: object) -> tuple[Encoded, str]:
        given.append(settings)
        return encoder, hash_path(source.locate())

    monkeypatch.setattr(llamagen, "load_t5", load)
    one = reading_captions(caption_files)
    one.load("cpu")
    images = one.generate(["A  Cat,dog", "(two)"], full(one), OneStream(1, 2))
    expected = (golden("t2i")["sampled.img"] * 127.5 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (images.int() - expected.int()).abs().max() <= 1  # where float32 comes to lie across a half
    assert (images != expected).float().mean() < 1e-3
    assert encoder.asked == ["a cat, dog", "two"]
    assert given == [("cpu", torch.float32, 120)]
    digests = "".join(hash_path(caption_files[part]) for part in ("transformer", "tokenizer", "text"))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()


def test_a_missing_file_says_where(caption_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    one = reading_captions(caption_files)
    missing = replace(one, sources={**one.sources, "text": Source("model.sources.text")})
    with pytest.raises(WeightsError, match=r"model\.sources\.text: weights missing"):
        missing.load("cpu")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "kvbench.models.llamagen.captions.find_spec", lambda name: None if name == "ftfy" else found(name)
    )
    with pytest.raises(
        WeightsError, match=r"^model\.text=t5: install the `text` extra, which cleans captions"
    ):
        one.load("cpu")
