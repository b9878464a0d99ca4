"""Tokenizers in GGUF files split texts as the models' own, and refuse what is not known."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.gguf import Gguf
from kvbench.models.files.gguf_tokenizer import make_tokenizer
from kvbench.models.files.weights import Source
from kvbench.models.text_tokens import read_tokenizer
from tests.support.gguf_file import byte_vocabulary, spell, write_gguf

pytest.importorskip("transformers")
TEXTS = [
    "1. one\n\n2. two\n\n10. ten",
    "a table:   123   4567\t89\n  x = 10000 + 1e-5  # it's\r\n\r\nIT'S we'LL don't",
    "naïve café — “quoted” … 12½ Ⅻ 東京2024年 مرحبا!",
    "   \n   def f(x):\n        return x**2\n\n\n",
    " ends with spaces   ",
    "",
]
TEMPLATE = """{% for m in messages %}
    {% if m.role == 'user' %}
<|u|>{{ m.content }}<|e|>
{% endif %}
{% endfor %}"""


def split(pre_tokenizer: Any, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def reference(pre: str) -> Any:
    """The pre-tokenizer of published tokenizer.json files (SmolLM2, GPT-2), or transformers' for GGUF files."""
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return gpt2
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    values = byte_vocabulary(pre)
    given = {"tokens": "tokens", "merges": "merges", "token_type": "token_type", "pre_tokenizer_type": "pre"}
    tokenizer, _ = mapping.convert_gguf_tokenizer(
        "llama",
        {"tokenizer_type": "gpt2", **{key: values[f"tokenizer.ggml.{ours}"] for key, ours in given.items()}},
    )
    return tokenizer.pre_tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "smaug-bpe"])
def test_texts_are_split_as_by_the_models_own_tokenizers_and_come_back(pre: str) -> None:
    tokenizer = make_tokenizer(Gguf(byte_vocabulary(pre), {}))
    found, expected = tokenizer.backend_tokenizer.pre_tokenizer, reference(pre)
    for text in TEXTS:
        assert split(found, text) == split(expected, text), text
        assert pre == "qwen2" or tokenizer.decode(tokenizer(text)["input_ids"]) == text  # which normalises


def test_the_default_splits_as_llama_cpp() -> None:
    """Punctuation, then GPT-2's words, then numbers, then three digits each."""
    found = make_tokenizer(Gguf(byte_vocabulary("default"), {})).backend_tokenizer.pre_tokenizer
    assert split(found, "it's 12345 x,y") == [*map(spell, ("it", "'", "s", " ", "123", "45", " x", ",", "y"))]


def test_special_tokens_template_and_first_token(tmp_path: Path) -> None:
    values = byte_vocabulary("llama-bpe", joined=("h|i", "hi|t"), control=("<|b|>", "<|u|>", "<|e|>"))
    numbers = {token: number for number, token in enumerate(values["tokenizer.ggml.tokens"])}  # type: ignore[arg-type]
    metadata = {
        **values,
        "tokenizer.ggml.bos_token_id": numbers["<|b|>"],
        "tokenizer.ggml.eos_token_id": numbers["<|e|>"],
        "tokenizer.chat_template": TEMPLATE,
    }
    source = Source("model.sources.weights", str(write_gguf(tmp_path / "x.gguf", metadata, {})))
    chat, plain = (read_tokenizer(source, thinking=False, chat=chat) for chat in (True, False))
    # Blocks are trimmed and stripped as transformers' template engine does it.
    asked = [numbers["<|u|>"], numbers["hi"], numbers["<|e|>"], numbers[spell("\n")]]
    assert chat.encode("hi") == asked
    assert plain.encode("hit") == [numbers["<|b|>"], numbers["hit"]]
    assert chat.decode([*asked[1:3], numbers["hit"]]) == "hihit"
    assert (chat.ends, chat.pad) == ((numbers["<|e|>"],), numbers["<|e|>"])
    metadata["tokenizer.ggml.add_bos_token"] = False
    write_gguf(tmp_path / "x.gguf", metadata, {})
    assert read_tokenizer(source, thinking=False, chat=False).encode("hi") == [numbers["hi"]]


def test_what_is_not_known_is_refused_in_one_line(tmp_path: Path) -> None:
    source = Source("model.sources.weights", str(tmp_path / "x.gguf"))
    for change, message in (
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": ["a"]}, "merges: ('a', '')"),
        ({"merges": ["a c"]}, "merges: ('a', 'c')"),
        ({"token_type": [1]}, "token_type is not a list of 257"),
        ({"eos_token_id": 999}, "eos_token_id is 999"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token is True"),
        ({}, "no end-of-answer token"),
    ):
        values = byte_vocabulary("smollm") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        write_gguf(Path(source.path), {k: v for k, v in values.items() if v is not None}, {})
        with pytest.raises(WeightsError, match=rf"^[^\n]*{re.escape(message)}[^\n]*$"):
            read_tokenizer(source, thinking=False, chat=False)
