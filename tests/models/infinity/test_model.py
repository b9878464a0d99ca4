"""Infinity and its text encoder as the harness sees them: a ratio, negative prompts, refusals, official features."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.models.base import TextFeatures
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.infinity import loop
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.positive_prompt import FACES_SUFFIX, add_positive_prompt
from kvbench.models.infinity.sampling import Sampling
from kvbench.models.noise import Noise, PromptNoise
from kvbench.models.parts.text import T5Encoder
from tests.support.reference import OneStream, note_results, packed
from tests.support.reference_infinity import read_shape
from tests.support.small_models import configured, full


def official(**settings: Any) -> InfinityModel:
    """The reference program's small model without patches."""
    transformer, vae = read_shape("ar_2b")
    given = {"sampling": Sampling(), "sources": {}, "weights": "random", "pixels": "0.06M", **settings}
    return InfinityModel("official", transformer, vae.config, **given)


def images(model: InfinityModel, prompts: Sequence[str], noise: Noise | None = None) -> Tensor:
    return model.generate(prompts, full(model), noise or PromptNoise(0, range(len(prompts))))


def test_a_ratio_in_the_settings_equals_the_official_program(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, meta = packed("ar_2b.real_r1500_006M")
    sampling = Sampling(meta["cfg_list"], meta["tau_list"], meta["top_k"], meta["top_p"] or 1.0)
    model = official(aspect=1.5, sampling=sampling)
    assert [(1, s.height, s.width) for s in model.spec.segments] == [*map(tuple, meta["scale_schedule"])]
    model.load("cpu")
    model._transformer.load_state_dict(packed("ar_2b.weights")[0])
    decoder = {name: value.float() for name, value in packed("vae_f16.weights")[0].items()}
    assert not model._tokenizer.load_state_dict(decoder, strict=False).unexpected_keys
    features = TextFeatures(expected["in.kv_compact"], tuple(expected["in.lens"].tolist()))
    model._text = SimpleNamespace(encode=lambda _: features)
    seen = note_results(monkeypatch, loop, "compute_logits")
    found = images(model, ["as given"], OneStream(meta["seed"], 1))
    for i, logits in enumerate(seen):
        torch.testing.assert_close(logits, expected[f"s{i}.logits"], atol=2e-4, rtol=0)
    difference = found.flip(3).int() - expected["image_u8_bgr"].int()
    assert difference.abs().max() <= 1  # rounded here, cut off there


def test_no_text_is_longer_than_the_learned_one() -> None:
    """The unconditional text of n words is the first n rows of what was learned."""
    text, _ = configured("model=infinity_2b", "model.weights=random")._read_text("cpu")
    assert text.encode(["word " * 600, "word"]).lengths == (512, 2)
    short = configured("model=infinity_tiny", "model.transformer.text_maxlen=13")
    assert tuple(short.transformer.rope_grid) == (36, 36)  # as configured, not that of the ratio
    with pytest.raises(
        ValueError, match="text_maxlen=13: must be at least 14, the words of the longest caption"
    ):
        short.check_prompts(["a red circle"])


def test_prompts_of_people_get_the_suffix_and_an_empty_negative_prompt_is_the_learned_text() -> None:
    asked: list[Sequence[str]] = []

    def draw(**settings: Any) -> Tensor:
        model = official(sizes=((1, 1), (2, 2)), **settings)
        model.load("cpu")
        inner = model._text.encode
        model._text.encode = lambda prompts: asked.append(prompts) or inner(prompts)
        return images(model, ["a woman", "a cat"])

    plain, empty = draw(), draw(negative_prompt="")
    negated = draw(positive_prompt=True, negative_prompt="an ugly man")
    suffixed = ["a woman" + FACES_SUFFIX, "a cat"]
    assert asked == [["a woman", "a cat"]] * 2 + [suffixed, ["an ugly man"] * 2]
    assert torch.equal(plain, empty)
    assert not torch.equal(plain[1], negated[1])


def test_a_folder_without_flan_t5_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    model = configured("model=infinity_2b", f"model.sources.text.path={tmp_path}")
    with pytest.raises(WeightsError, match=f"^model.sources.text: no Flan-T5 .* in {tmp_path}"):
        model._read_text("cpu")


WORDS = ["a", "red", "cat", "and", "two", "dogs", "on", "the", "left"]
WIDTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 of two layers and a tokenizer of a few words, in files as the Hub has them."""
    transformers, root = pytest.importorskip("transformers"), tmp_path_factory.mktemp("t5")
    pieces = [
        ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -9.0), *((f"▁{word}", -2.0) for word in WORDS),
    ]  # fmt: skip
    transformers.T5TokenizerFast(vocab=pieces, extra_ids=0).save_pretrained(root)
    config = transformers.T5Config(
        vocab_size=len(pieces), d_model=WIDTH, d_kv=4, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", dropout_rate=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.T5EncoderModel(config)
        for parameter in model.parameters():  # fresh ones hardly differ from word to word
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(root)
    return root


def encode_officially(folder: Path, prompts: list[str]) -> TextFeatures:
    """Padded to 512 tokens under a mask, cut afterwards, as Infinity's `encode_prompt` does it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, legacy=True, model_max_length=512)
    model = transformers.T5EncoderModel.from_pretrained(folder).eval()
    tokens = tokenizer(prompts, max_length=512, padding="max_length", truncation=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
    lengths = tuple(tokens.attention_mask.sum(1).tolist())
    rows = [row[:length] for row, length in zip(states.float(), lengths, strict=True)]
    return TextFeatures(torch.cat(rows), lengths)


def rows(features: TextFeatures) -> list[Tensor]:
    return list(features.values.split(features.lengths))


def test_features_are_those_of_the_official_call(folder: Path) -> None:
    prompts = ["a red cat", "", "two dogs on the left and a cat", "a cat " * 400]
    found = T5Encoder(str(folder), "cpu", torch.float32).encode(prompts)
    expected = encode_officially(folder, prompts)
    assert found.lengths == expected.lengths == (4, 1, 9, 512)  # the end token counts
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-5)
    first, last = rows(found)[0], rows(found)[2]
    assert (first[0] - last[0]).abs().max() > 0.1  # words see each other


def test_a_prompt_too_long_is_cut_and_ends_all_the_same(folder: Path) -> None:
    found = T5Encoder(str(folder), "cpu", torch.float32, longest=5).encode(
        ["a red cat and two dogs", "a red"]
    )
    assert found.lengths == (5, 3)


def test_half_precision_is_close_and_returned_in_float32(folder: Path) -> None:
    found, exact = (
        T5Encoder(str(folder), "cpu", t).encode(["a red cat"]) for t in (torch.float16, torch.float32)
    )
    assert found.values.dtype == torch.float32
    assert 0 < (found.values - exact.values).abs().max() < 0.05


def test_faces_are_for_prompts_that_hold_a_word_for_people() -> None:
    for prompt, faces in (("a woman", True), ("many cats", True), ("a cat", False), ("A Man", False)):
        assert add_positive_prompt(prompt) == prompt + FACES_SUFFIX * faces
