"""Settings of generation in a model's files: what a run does not follow is named, whatever the key."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from kvbench.methods.full import Full
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.generation_config import list_unfollowed, read_generation_config
from kvbench.models.files.gguf import Gguf
from kvbench.models.files.gguf_tokenizer import make_generation_config
from kvbench.models.files.weights import Source
from kvbench.models.llama.model import LlamaModel
from kvbench.models.parts.text_sampling import TextSampling
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from tests.support.fake_run import job_in
from tests.support.gguf_file import byte_vocabulary
from tests.support.reference_llama import write_twin

transformers = pytest.importorskip("transformers")
KEY = "model.sources.weights"
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
WITHOUT_EFFECT = {
    # Stop tokens are followed; lengths, which are `model.max_tokens`; other tokens, ways to compute the same texts,
    # outputs, and parts of beams.
    "eos_token_id",
    *(
        "max_length",
        "max_new_tokens",
        "max_cache_len",
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
    ),
    *("use_mtp", "use_cache", "cache_implementation", "cache_config", "is_assistant", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile", "low_memory"),
    *("continuous_batching_config", "prefill_chunk_size", "num_return_sequences", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "early_stopping"),
    *("length_penalty", "num_beam_groups", "renormalize_logits", "remove_invalid_values"),
    *("_from_model_config", "transformers_version"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm3")
    write_twin("smollm3", path)
    return path


def reading(path: Path) -> LlamaModel:
    sources = {"weights": Source(KEY, str(path))}
    return LlamaModel(
        name="twin", sampling=TextSampling(0), sources=sources, prompt_tokens=7, max_tokens=9, chunk=8
    )


@pytest.mark.parametrize("key", [*transformers.GenerationConfig().to_dict()])
def test_every_key_of_transformers_is_named_or_has_no_effect(key: str) -> None:
    found = list_unfollowed({"do_sample": True, key: 7}, {**GREEDY, "temperature": 0.5})
    assert (found.get(key) == 7) == (key not in WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("config", "sampling", "expected"),
    [
        ({}, GREEDY, {}),
        (QWEN, GREEDY, QWEN),
        (QWEN, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"repetition_penalty": 1.05}),
        ({"do_sample": True}, {**GREEDY, "temperature": 1.0}, {"top_k": 50}),
        ({"do_sample": False, "temperature": 0.6}, GREEDY, {}),
        ({"do_sample": False}, {**GREEDY, "temperature": 0.6}, {"do_sample": False}),
        ({"suppress_tokens": [], "min_new_tokens": 0, "repetition_penalty": 1.0, "num_beams": 1}, GREEDY, {}),
        ({"forced_eos_token_id": None, "token_healing": False, "min_p": 0.0}, GREEDY, {}),
        *(({key: value}, GREEDY, {key: value}) for key, value in [
            ("forced_eos_token_id", 0), ("min_new_tokens", 1), ("suppress_tokens", [0]), ("num_beams", "four"),
            ("no_repeat_ngram_size", [3]), ("repetition_penalty", 1.2),
        ]),
    ],
)  # fmt: skip
def test_what_changes_texts_is_named(
    config: dict[str, object], sampling: dict[str, object], expected: dict[str, object]
) -> None:
    assert list_unfollowed(config, sampling) == expected


def test_a_run_says_once_what_it_does_not_follow(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(QWEN))
    one, prompts = reading(tmp_path / "model"), [Prompt(0, "one plus two")]
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
    qwen = Qwen3Model("small", reading(folder).shape, TextSampling(0), sources)  # type: ignore[arg-type]
    assert qwen.unfollowed == {"no_repeat_ngram_size": 3}
    keys = {"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 1.1}
    config = make_generation_config(Gguf({**byte_vocabulary("smollm"), **keys}, {}))
    assert list_unfollowed(config, GREEDY) == {
        "do_sample": True, "temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1
    }  # fmt: skip


@pytest.mark.parametrize("content", ["", "[]", "3", "{", b"\xff"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WeightsError, match=rf"^{KEY}: {path}: cannot be read \(.*\); copy the model's file"):
        read_generation_config(Source(KEY, str(tmp_path)))
    path.unlink()
    assert read_generation_config(Source(KEY, str(tmp_path))) == {}


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("generation_config.json", "eos_token_id", 97),
        ("config.json", "eos_token_id", [1, 10**6]),
        ("tokenizer_config.json", "eos_token", "<new>"),
        ("tokenizer_config.json", "pad_token", "<new>"),
        ("tokenizer_config.json", "bos_token", "<new>"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(
    folder: Path, tmp_path: Path, file: str, key: str, value: object
) -> None:
    """The twin has 97 tokens; `<new>` gets the next number."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / file
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | {key: value}))
    number = 10**6 if value == [1, 10**6] else 97
    with pytest.raises(WeightsError, match=rf"^{KEY}: eos_token_id, .* is {number}, but it has 97 tokens; "):
        reading(tmp_path / "model").open_tokenizer()
