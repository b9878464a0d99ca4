"""Tokenizers in GGUF files split texts as the models' own; settings of files that a run does not follow are named."""

import inspect
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.methods.full import Full
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.generation_config import list_ignored
from kvbench.models.files.gguf import Gguf
from kvbench.models.files.gguf_tokenizer import make_generation_config, make_tokenizer
from kvbench.models.files.weights import Source
from kvbench.models.parts.text_sampling import TextSampling
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.text_tokens import read_tokenizer
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from tests.support.fake_run import job_in
from tests.support.gguf_file import byte_vocabulary, spell, write_gguf
from tests.support.reference_llama import reading, write_twin

transformers = pytest.importorskip("transformers")
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


KEY = "model.sources.weights"
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
WITHOUT_EFFECT = {
    "remove_invalid_values", "renormalize_logits", "use_cache", "is_assistant",
    "assistant_confidence_threshold",
}  # fmt: skip
"""Keys of transformers' processors that change no likeliest token, or belong to a second model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm3")
    write_twin("smollm3", path)
    return path


def test_every_key_that_transformers_processes_is_named() -> None:
    mixin = transformers.GenerationMixin
    source = inspect.getsource(mixin._get_logits_processor) + inspect.getsource(mixin._get_stopping_criteria)
    keys = set(re.findall(r"generation_config\.([a-z]\w+)", source))
    found = list_ignored(dict.fromkeys(keys, 7), GREEDY)
    assert keys - found.keys() == WITHOUT_EFFECT | {"max_length"}  # which is model.max_tokens
    assert len(keys) > 30


def test_what_changes_texts_is_named() -> None:
    for config, sampling, expected in (
        ({}, GREEDY, {}),
        (QWEN, GREEDY, QWEN),
        (QWEN, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"repetition_penalty": 1.05}),
        ({"do_sample": True}, {**GREEDY, "temperature": 1.0}, {"top_k": 50}),
        ({"do_sample": False, "temperature": 0.6}, GREEDY, {}),
        ({"do_sample": False}, {**GREEDY, "temperature": 0.6}, {"do_sample": False}),
        ({"suppress_tokens": [], "min_new_tokens": 0, "repetition_penalty": 1.0, "num_beams": 1}, GREEDY, {}),
        ({"forced_eos_token_id": None, "token_healing": False, "min_p": 0.0}, GREEDY, {}),
        ({"forced_eos_token_id": 0}, GREEDY, {"forced_eos_token_id": 0}),
        ({"suppress_tokens": [0]}, GREEDY, {"suppress_tokens": [0]}),
    ):
        assert list_ignored(config, sampling) == expected


def test_a_run_says_once_what_it_does_not_follow(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(QWEN))
    one, prompts = reading(tmp_path / "model", max_tokens=9), [Prompt(0, "one plus two")]
    job = job_in(tmp_path, model=one, method=Full(), budget=1, prompts=prompts, evaluators={}, sinks=0)
    outcome = execute.run(job)
    line = "model=twin: its files say repetition_penalty=1.05, do_sample=True, temperature=0.7, top_k=20, top_p=0.8, "
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [one for one in said if "followed" in one] == [
        f"{line}which is not followed; model.sampling sets temperature, top_k and top_p"
    ]
    assert json.loads((outcome.folder / "provenance.json").read_text())["not_followed"] == QWEN


def test_qwen3_and_gguf_files_name_theirs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"no_repeat_ngram_size": 3}')
    sources = {"weights": Source(KEY, str(tmp_path))}
    shape = Qwen3Config(depth=1, width=16, heads=2, kv_heads=1, head_dim=8, hidden=16, vocabulary=12)
    qwen = Qwen3Model("small", shape, TextSampling(0), sources)
    assert qwen.ignored_settings == {"no_repeat_ngram_size": 3}
    keys = {"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 1.1}
    config = make_generation_config(Gguf({**byte_vocabulary("smollm"), **keys}, {}))
    assert list_ignored(config, GREEDY) == {
        "do_sample": True, "temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1
    }  # fmt: skip


def test_tokens_beyond_the_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    """The twin has 97 tokens; `<new>` gets the next number."""
    copy = shutil.copytree(folder, tmp_path / "model")
    for file, change in (
        ("generation_config.json", {"eos_token_id": 97}),
        ("config.json", {"eos_token_id": [1, 97]}),
        *(("tokenizer_config.json", {f"{kind}_token": "<new>"}) for kind in ("pad", "bos")),
    ):
        path = copy / file
        content = path.read_text() if path.is_file() else "{}"
        path.write_text(json.dumps(json.loads(content) | change))
        with pytest.raises(WeightsError, match=rf"^{KEY}: eos_token_id, .* is 97, not below vocab_size=97; "):
            reading(copy).open_tokenizer()
        path.write_text(content)
