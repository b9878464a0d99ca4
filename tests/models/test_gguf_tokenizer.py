"""Tokenizers in GGUF files split texts as the models' own, and refuse what is not known."""

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


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "dbrx", "smaug-bpe"])
def test_texts_are_split_as_by_the_models_own_tokenizers(pre: str) -> None:
    found = make_tokenizer(Gguf(byte_vocabulary(pre), {})).backend_tokenizer.pre_tokenizer
    expected = reference(pre)
    for text in TEXTS:
        assert split(found, text) == split(expected, text), text


def test_the_default_splits_as_llama_cpp() -> None:
    """Punctuation, then GPT-2's words, then numbers, then three digits each."""
    found = make_tokenizer(Gguf(byte_vocabulary("default"), {})).backend_tokenizer.pre_tokenizer
    assert split(found, "it's 12345 x,y") == [
        spell(one) for one in ("it", "'", "s", " ", "123", "45", " x", ",", "y")
    ]


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


def test_decoding_is_the_inverse_of_encoding() -> None:
    tokenizer = make_tokenizer(Gguf(byte_vocabulary("smollm"), {}))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["a"]}, "merges: ('a', '')"),
        ({"merges": ["a c"]}, "merges: ('a', 'c')"),
        ({"token_type": [1]}, "token_type is not a list of 257"),
        ({"eos_token_id": 999}, "eos_token_id is 999"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token is True"),
        ({}, "no end-of-answer token"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    values = byte_vocabulary("smollm") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    metadata = {key: value for key, value in values.items() if value is not None}
    path = write_gguf(tmp_path / "x.gguf", metadata, {})
    with pytest.raises(WeightsError) as refusal:
        read_tokenizer(Source("model.sources.weights", str(path)), thinking=False, chat=False)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
