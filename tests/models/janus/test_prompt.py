"""Janus-Pro's prompts: the official chat, the tokens of a tokenizer like the published one, and what does not fit."""

import json
from pathlib import Path

import pytest

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.janus.prompt import BEGIN, IMAGE, PAD, chat, hash_tokens, read_tokens
from kvbench.models.parts.tokens import FramedTokens, encode_prompts, lay_out, read_tokenizer
from tests.support.byte_tokenizer import TEXT, write_byte_tokenizer
from tests.support.reference_janus import meta

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = (BEGIN, IMAGE, PAD, "<|User|>", "<|Assistant|>")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "tokenizer.json", SPECIAL, {}, 0)


def read(path: Path) -> tuple[FramedTokens, str]:
    return read_tokenizer(Source("model.sources.text", str(path)), read_tokens, "Janus-Pro")


def test_the_chat_is_the_official_one() -> None:
    assert chat("a red cube") == chat(" a red cube\n") == meta()["template"]["pro"]
    assert chat("") == chat("  ") == meta()["template"]["empty_prompt"]


def test_tokens_say_what_the_chat_says(path: Path) -> None:
    tokenizer, digest = read(path)
    assert len(digest) == 64
    tokens = tokenizer.encode(TEXT)
    reader = tokenizers.Tokenizer.from_file(str(path))
    marks = [reader.token_to_id(name) for name in (BEGIN, IMAGE, PAD)]
    assert [tokens[0], tokens[-1], tokenizer.pad] == marks
    assert reader.decode(tokens, skip_special_tokens=False) == BEGIN + chat(TEXT)
    user, assistant = (reader.token_to_id(name) for name in ("<|User|>", "<|Assistant|>"))
    assert [tokens.count(number) for number in (user, assistant, *marks)] == [1, 1, 1, 1, 0]
    assert len(tokens) == len(b": \n\n:") + len(TEXT.encode()) + 4


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    other = write_byte_tokenizer(tmp_path / "other.json", SPECIAL[:2], {}, 0)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"version": "1.0"}))
    for path, reason in ((other, f"it has no token {PAD}"), (broken, "")):
        with pytest.raises(WeightsError, match=rf"^model\.sources\.text: .* is not Janus-Pro's.*{reason}"):
            read(path)
    with pytest.raises(WeightsError, match=r"^model\.sources\.text\.path=.*does not exist"):
        read(tmp_path / "none.json")


def test_padding_stands_in_front_and_the_other_branch_is_as_long(path: Path) -> None:
    tokenizer, _ = read(path)
    prompts = ["a cat", "", "a longer cat"]
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    room = max(lengths) + 2
    rows, padding = lay_out(prompts, tokenizer, room, guided=True)
    assert padding == [room - length for length in lengths] * 2
    [begin, *_, image], pad = tokenizer.encode(""), tokenizer.pad
    assert len({begin, image, pad}) == 3
    for index, prompt in enumerate(prompts):
        front = [pad] * padding[index]
        assert rows[index].tolist() == front + tokenizer.encode(prompt)
        assert rows[index + 3].tolist() == [*front, begin, *[pad] * (lengths[index] - 2), image]


def test_prompts_that_do_not_fit_say_what_room_they_need() -> None:
    tokenizer = hash_tokens(50)
    encode_prompts(["a b c"], tokenizer, 5)
    encode_prompts([], tokenizer, 5)
    message = "prompt 'a b c d e' has 7 tokens: set model.prompt_tokens=7, which is 5"
    with pytest.raises(ValueError, match=message):
        encode_prompts(["a b", "a b c d e", "a b c d"], tokenizer, 5)
    with pytest.raises(ValueError, match=message):
        lay_out(["a b c d e"], tokenizer, 5, guided=True)


def test_the_stand_in_tells_words_apart_and_stays_in_the_vocabulary() -> None:
    tokenizer = hash_tokens(50)
    assert tokenizer.encode("") == [0, 1]
    tokens = tokenizer.encode("a red cat a")
    assert tokens[1] == tokens[4] != tokens[2]
    assert all(3 <= token < 50 for token in tokens[1:-1])
    assert len({tuple(tokenizer.encode(str(i))) for i in range(200)}) > 40
