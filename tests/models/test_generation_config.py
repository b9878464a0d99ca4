"""Settings of generation in a model's files: what a run does not follow is named, whatever the key."""

import inspect
import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from kvbench.methods.full import Full
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.generation_config import list_ignored
from kvbench.models.files.gguf import Gguf
from kvbench.models.files.gguf_tokenizer import make_generation_config
from kvbench.models.files.weights import Source
from kvbench.models.parts.text_sampling import TextSampling
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from tests.support.fake_run import job_in
from tests.support.gguf_file import byte_vocabulary
from tests.support.reference_llama import reading, write_twin

transformers = pytest.importorskip("transformers")
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
