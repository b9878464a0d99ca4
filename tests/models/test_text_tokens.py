"""The tokenizer that is a list of words, and the spaces of decoded texts."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.text_tokens import ChatTokenizer, WordTokens, read_tokenizer

WORDS = ("<pad>", "<end>", "\n1", "\n12", " a", " a<", "do")


@given(st.lists(st.sampled_from(WORDS[2:]), max_size=12))
def test_texts_of_words_come_back(words: list[str]) -> None:
    tokenizer, text = WordTokens(WORDS), "".join(words)
    tokens = tokenizer.encode(text)
    assert tokens == [WORDS.index(word) for word in words]
    assert tokenizer.decode([0, *tokens, 1, 0]) == text


def test_what_is_no_word_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"prompt 'do a<x'\.\.\.: 'x' is not in the model's vocabulary"):
        WordTokens(WORDS).encode("do a<x")
    with pytest.raises(ValueError, match="is not in the model"):
        WordTokens(WORDS).encode("<end>")


@pytest.mark.parametrize("words", [["<pad>", "<end>"], [*WORDS, "do"]])
def test_a_list_that_cannot_be_is_refused_by_key(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "vocabulary.json").write_text(json.dumps(words))
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: .*three words or more"):
        read_tokenizer(Source("model.sources.weights", str(tmp_path)), thinking=True)


def test_a_folder_with_a_list_needs_no_library(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.json").write_text(json.dumps(WORDS))
    read = read_tokenizer(Source("model.sources.weights", str(tmp_path)), thinking=True)
    assert read.encode("do a") == [6, 4]


def test_decoded_texts_keep_their_spaces(tmp_path: Path) -> None:
    """Although the file asks for a clean-up, which transformers below 5.3 does for every kind of tokenizer."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    text = "x != y , it 's ! do n't ?"
    vocabulary = {word: number for number, word in enumerate(["<end>", *dict.fromkeys(text.split())])}
    reader = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    reader.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=reader, eos_token="<end>", clean_up_tokenization_spaces=True
    ).save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path, thinking=False, chat=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
