"""LlamaGen as the harness sees it: prompts, shapes, official files, random weights, and every method on it."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.files import hash_path
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.weights import Source, WeightsError
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
