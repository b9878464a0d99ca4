"""Infinity as the harness sees it: a ratio that is set, negative prompts, settings that are refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.files import hash_content, hash_path
from kvbench.models.base import TextFeatures
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.infinity import loop
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.positive_prompt import FACES_SUFFIX
from kvbench.models.infinity.sampling import Sampling
from kvbench.models.noise import Noise, PromptNoise
from kvbench.models.parts.text import HashedText
from tests.support.reference import OneStream, packed
from tests.support.reference_infinity import read_shape
from tests.support.small_models import configured, full


def official(**settings: Any) -> InfinityModel:
    """The reference program's small model without patches."""
    transformer, vae = read_shape("ar_2b")
    given = {"sampling": Sampling(), "sources": {}, "weights": "random", "pixels": "0.06M", **settings}
    return InfinityModel("official", transformer, vae.config, **given)


def images(model: InfinityModel, prompts: Sequence[str], noise: Noise | None = None) -> Tensor:
    return model.generate(prompts, full(model), noise or PromptNoise(0, range(len(prompts))))


class Given:
    """Stands for a text encoder: features of the reference run, whatever the prompts."""

    def __init__(self, features: TextFeatures) -> None:
        self.encode = lambda prompts: features


def test_a_ratio_in_the_settings_equals_the_official_program(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, meta = packed("ar_2b.real_r1500_006M")
    sampling = Sampling(meta["cfg_list"], meta["tau_list"], meta["top_k"], meta["top_p"] or 1.0)
    model = official(aspect=1.5, sampling=sampling)
    assert [(1, s.height, s.width) for s in model.spec.segments] == [*map(tuple, meta["scale_schedule"])]
    model.load("cpu")
    model._transformer.load_state_dict(packed("ar_2b.weights")[0])
    decoder = {name: value.float() for name, value in packed("vae_f16.weights")[0].items()}
    assert not model._tokenizer.load_state_dict(decoder, strict=False).unexpected_keys
    model._text = Given(TextFeatures(expected["in.kv_compact"], tuple(expected["in.lens"].tolist())))
    seen: list[Tensor] = []
    inner = loop.compute_logits
    monkeypatch.setattr(loop, "compute_logits", lambda *given: seen.append(inner(*given)) or seen[-1])
    found = images(model, ["as given"], OneStream(meta["seed"], 1))
    for i, logits in enumerate(seen):
        torch.testing.assert_close(logits, expected[f"s{i}.logits"], atol=2e-4, rtol=0)
    difference = found.flip(3).int() - expected["image_u8_bgr"].int()
    assert difference.abs().max() <= 1  # rounded here, cut off there


def test_a_configured_grid_wins() -> None:
    for named, grid in (
        (("model=infinity_tiny",), (36, 36)),
        (("model=infinity_8b",), (64, 64)),
        (("model=infinity_2b", "model.aspect=3", "+model.transformer.rope_grid=[9,7]"), (9, 7)),
    ):
        found = configured(*named).transformer.rope_grid
        assert found is not None
        assert tuple(found) == grid


def test_no_text_is_longer_than_the_learned_one() -> None:
    """The unconditional text of n words is the first n rows of what was learned."""
    text, _ = configured("model=infinity_2b", "model.weights=random")._read_text("cpu")
    assert text.encode(["word " * 600, "word"]).lengths == (512, 2)
    short = configured("model=infinity_tiny", "model.transformer.text_maxlen=13")
    with pytest.raises(
        ValueError, match="text_maxlen=13: must be at least 14, the words of the longest caption"
    ):
        short.check_prompts(["a red circle"])


class Heard(HashedText):
    """A text encoder that remembers what it was asked for."""

    def __init__(self, width: int) -> None:
        super().__init__(width, "cpu")
        self.heard: list[list[str]] = []

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        self.heard.append(list(prompts))
        return super().encode(prompts)


PROMPTS = ["a woman", "a cat"]


def heard(**settings: Any) -> tuple[list[list[str]], Tensor]:
    model = official(sizes=((1, 1), (2, 2)), **settings)
    model.load("cpu")
    model._text = encoder = Heard(model.transformer.text_width)
    found = images(model, PROMPTS)
    return encoder.heard, found


def test_the_faces_suffix_is_for_prompts_alone() -> None:
    asked, _ = heard(positive_prompt=True, negative_prompt="an ugly man")
    assert asked == [["a woman" + FACES_SUFFIX, "a cat"], ["an ugly man"] * 2]


def test_an_empty_negative_prompt_is_the_learned_text() -> None:
    (asked, found), (_, plain) = heard(negative_prompt=""), heard()
    assert asked == [PROMPTS]
    assert torch.equal(found, plain)
    asked, other = heard(negative_prompt="blurred")
    assert asked == [PROMPTS, ["blurred"] * 2]
    assert not torch.equal(other, plain)


@pytest.mark.parametrize("file", ["README.md", "config.json"])
def test_a_folder_without_flan_t5_is_refused(file: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / file).write_text("{}")
    model = configured("model=infinity_2b", f"model.sources.text.path={tmp_path}")
    with pytest.raises(WeightsError, match=f"^model.sources.text: no Flan-T5 .* in {tmp_path}"):
        model._read_text("cpu")


def test_the_identity_of_other_runs_is_that_of_the_files() -> None:
    model = configured("model=infinity_tiny")
    model.load("cpu")
    files = [hash_path(model.sources[part].locate()) for part in ("transformer", "tokenizer", "text")]
    assert model.weights_sha256 == hash_content("".join(files))
