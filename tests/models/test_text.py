"""Text encoders: Flan-T5 as the official program calls it, on a tiny one of random weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.models.base import TextFeatures
from kvbench.models.infinity.positive_prompt import FACES_SUFFIX, add_positive_prompt
from kvbench.models.parts.text import T5Encoder

transformers = pytest.importorskip("transformers")

WORDS = ["a", "red", "cat", "and", "two", "dogs", "on", "the", "left"]
WIDTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 of two layers and a tokenizer of a few words, in files as the Hub has them."""
    root = tmp_path_factory.mktemp("t5")
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


def official(folder: Path, prompts: list[str]) -> TextFeatures:
    """Padded to 512 tokens under a mask, cut afterwards, as Infinity's `encode_prompt` does it."""
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
    found, expected = T5Encoder(str(folder), "cpu", torch.float32).encode(prompts), official(folder, prompts)
    assert found.lengths == expected.lengths == (4, 1, 9, 512)  # the end token counts
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-5)
    first, last = rows(found)[0], rows(found)[2]
    assert (first[0] - last[0]).abs().max() > 0.1  # words see each other


def test_a_prompt_too_long_is_cut_and_ends_all_the_same(folder: Path) -> None:
    short = T5Encoder(str(folder), "cpu", torch.float32, longest=5)
    found = short.encode(["a red cat and two dogs on the left", "a red"])
    assert found.lengths == (5, 3)
    torch.testing.assert_close(rows(found)[0], short.encode(["a red cat and"]).values)


def test_half_precision_is_close_and_returned_in_float32(folder: Path) -> None:
    found, exact = (
        T5Encoder(str(folder), "cpu", t).encode(["a red cat"]) for t in (torch.float16, torch.float32)
    )
    assert found.values.dtype == torch.float32
    assert 0 < (found.values - exact.values).abs().max() < 0.05


def test_faces_are_for_prompts_that_hold_a_word_for_people() -> None:
    for prompt, faces in (("a woman", True), ("many cats", True), ("a cat", False), ("A Man", False)):
        assert add_positive_prompt(prompt) == prompt + FACES_SUFFIX * faces
