"""LlamaGen with captions as the harness sees it: Flan-T5's features, padding in front, and methods on it."""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from kvbench.core.files import hash_path
from kvbench.engine.cache import KVCache
from kvbench.methods.base import Method
from kvbench.models.base import TextFeatures
from kvbench.models.llamagen import model as llamagen
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.noise import PromptNoise
from kvbench.models.weights import Source, WeightsError
from tests.support.engine import prepared
from tests.support.methods import methods_for
from tests.support.reference import OneStream
from tests.support.reference_llamagen import CONFIGS, TINY_VQ, golden, official_state
from tests.support.small_models import composed, full

SMALL = (
    "model=llamagen_xl_t2i",
    "model.weights=random",
    "model.transformer.depth=2",
    "model.transformer.width=32",
    "model.transformer.heads=2",
    "model.transformer.kv_heads=2",
    "model.transformer.head_dim=16",
    "model.transformer.hidden=64",
    "model.transformer.vocabulary=128",
    "model.transformer.grid=[5,6]",
    "model.transformer.text_width=24",
    "model.transformer.text_tokens=8",
    "model.tokenizer.codes=128",
    "model.tokenizer.latents=16",
    "model.tokenizer.widths=[32,32,64]",
    "model.tokenizer.blocks=1",
)
PROMPTS = ["a red circle", "two blue rings and a dog on a"]


def model(*overrides: str) -> LlamaGenModel:
    return instantiate(composed(*overrides).model)


@pytest.fixture(scope="module")
def tiny() -> LlamaGenModel:
    one = model(*SMALL)
    one.load("cpu")
    return one


@pytest.mark.parametrize(("name", "side", "stage"), [("", 16, "1_256"), ("_512", 32, "2_512")])
def test_published_shapes(name: str, side: int, stage: str) -> None:
    one = model(f"model=llamagen_xl_t2i{name}")
    spec = one.spec
    assert one.parameters == 777_678_080 + 120 * 2048 + 71_883_403  # no caption is among the weights
    assert (spec.layers, spec.heads, spec.head_dim, spec.branches) == (36, 20, 64, 2)
    assert [segment.length for segment in spec.segments] == [120, *[side] * (side - 1), side - 1]
    files = {part: source.file for part, source in one.sources.items()}
    assert files == {"transformer": f"t2i_XL_stage{stage}.pt", "tokenizer": "vq_ds16_t2i.pt", "text": None}
    assert one.sources["text"].repo == "google/flan-t5-xl"


def test_images_depend_on_caption_and_noise_and_on_nothing_else(tiny: LlamaGenModel) -> None:
    def images(prompts: list[str], seed: int) -> Tensor:
        return tiny.generate(prompts, full(tiny), PromptNoise(seed, range(len(prompts))))

    tiny.check_prompts([*PROMPTS, "", "12"])
    first = images(PROMPTS, 0)
    assert (first.shape, first.dtype) == ((2, 20, 24, 3), torch.uint8)
    assert not torch.equal(images(["a blue circle", PROMPTS[1]], 0)[0], first[0])
    assert not torch.equal(images(PROMPTS, 1)[0], first[0])
    for index, prompt in enumerate(PROMPTS):
        alone = tiny.generate([prompt], full(tiny), PromptNoise(0, (index,)))
        assert (alone[0].int() - first[index].int()).abs().max() <= 1
    assert torch.equal(
        images(["a b c d e f g h i j", ""], 0)[0], images(["a b c d e f g x", ""], 0)[0]
    )  # cut


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
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The reference model as official files, and a file in place of Flan-T5's."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "converted"))
    paths = {part: tmp_path / f"{part}.pt" for part in ("transformer", "tokenizer", "text")}
    torch.save({"model": official_state("t2i_tiny")}, paths["transformer"])
    torch.save({"model": official_state("vq_tiny")}, paths["tokenizer"])
    paths["text"].write_text("features")
    return paths


def reading(files: dict[str, Path]) -> LlamaGenModel:
    sources = {part: Source(f"model.sources.{part}", str(path)) for part, path in files.items()}
    sampling = replace(model("model=llamagen_xl_t2i").sampling, top_k=50)
    return LlamaGenModel("llamagen_golden", CONFIGS["t2i"], TINY_VQ, sampling, sources, text="t5")


def test_official_files_give_the_official_images(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ftfy")
    encoder, given = Encoded(), []

    def load(source: Source, *settings: object) -> tuple[Encoded, str]:
        given.append(settings)
        return encoder, hash_path(source.locate())

    monkeypatch.setattr(llamagen, "load_t5", load)
    one = reading(files)
    one.load("cpu")
    images = one.generate(["A  Cat,dog", "(two)"], full(one), OneStream(1, 2))
    expected = (golden("t2i")["sampled.img"] * 127.5 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (images.int() - expected.int()).abs().max() <= 1  # where float32 comes to lie across a half
    assert (images != expected).float().mean() < 1e-3
    assert encoder.asked == ["a cat, dog", "two"]
    assert given == [("cpu", torch.float32, 120)]
    digests = "".join(hash_path(files[part]) for part in ("transformer", "tokenizer", "text"))
    assert one.weights_sha256 == hashlib.sha256(digests.encode()).hexdigest()


def test_what_is_missing_says_how_to_get_it(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="names no text; use"):
        replace(reading(files), sources={k: v for k, v in reading(files).sources.items() if k != "text"})
    missing = replace(
        reading(files), sources={**reading(files).sources, "text": Source("model.sources.text")}
    )
    with pytest.raises(WeightsError, match=r"model\.sources\.text: weights missing"):
        missing.load("cpu")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "kvbench.models.llamagen.captions.find_spec", lambda name: None if name == "ftfy" else found(name)
    )
    with pytest.raises(
        WeightsError, match=r"^model\.text=t5: install the `text` extra, which repairs captions"
    ):
        reading(files).load("cpu")


@pytest.mark.parametrize("name", [name for name in methods_for("next-token") if name != "full"])
def test_methods_draw_images_of_unequal_captions(tiny: LlamaGenModel, name: str) -> None:
    method: Method = instantiate(composed(*SMALL, f"method={name}").method)
    needs = method.needs()
    artifact = None if needs is None else needs.make_stand_in(tiny.spec)
    cache = KVCache(tiny.spec, prepared(method, tiny.spec, "0.5", artifact), dtype=torch.float32)
    images = tiny.generate(PROMPTS, cache, PromptNoise(0, (0, 1)))
    assert 0 < cache.ledger.peak_tokens <= method.budget.capacity
    alone = tiny.generate(PROMPTS[:1], cache, PromptNoise(0, (0,)))
    assert (alone[0].int() - images[0].int()).abs().max() <= 1
    assert not torch.equal(images, tiny.generate(PROMPTS, full(tiny), PromptNoise(0, (0, 1))))
