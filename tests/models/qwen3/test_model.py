"""Qwen3 as the harness sees it: shapes, folders, and texts that end."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.budget import Budget
from kvbench.core.files import hash_files
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.noise import PromptNoise
from kvbench.models.outputs import Text
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.sampling import TextSampling
from tests.support.reference_qwen3 import END, SHAPE, WORDS, check_greedy, write_folder, write_tokenizer
from tests.support.small_models import SMALL_QWEN3, full, load

SMALL = (*SMALL_QWEN3, "model.max_tokens=41", "model.sampling.temperature=1.0", "model.sampling.top_k=0")
PROMPTS = ["what is one plus two", "why"]


@pytest.fixture(scope="module")
def tiny() -> Qwen3Model:
    return load(*SMALL)


def write(one: Qwen3Model, prompts: list[str] = PROMPTS, seed: int = 0, first: int = 0) -> list[Text]:
    return one.generate(prompts, full(one), PromptNoise(seed, range(first, first + len(prompts))))


def test_texts_depend_on_prompt_and_noise_and_on_nothing_else(tiny: Qwen3Model) -> None:
    first = write(tiny)
    assert write(load(*SMALL)) == first
    assert write(tiny, ["how is one plus two", PROMPTS[1]])[0] != first[0]
    assert write(tiny, seed=1) != first
    assert write(tiny, PROMPTS[1:], first=1) == first[1:]
    roomy = replace(tiny, prompt_tokens=20)
    roomy.load("cpu")
    assert write(roomy) == first


def test_a_text_that_ended_changes_nothing_beside_it_and_counts_no_more(tiny: Qwen3Model) -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    texts = write(tiny, prompts)
    assert {text.ended for text in texts} == {True, False}
    for number, text in enumerate(texts):
        assert write(tiny, [prompts[number]], first=number) == [text]
        words = text.text.split()
        assert len(words) == text.tokens - text.ended
        assert f"w{END}" not in words
        if not text.ended:
            assert text.tokens == tiny.max_tokens
    longer = replace(tiny, stop=False)
    longer.load("cpu")
    assert [(text.tokens, text.ended) for text in write(longer, prompts)] == [(41, False)] * 12


def test_generation_stops_when_all_have_ended(tiny: Qwen3Model) -> None:
    calls = 0
    inner = tiny._transformer.forward

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return inner(*given)

    found = write(tiny, ["x"] * 40)
    soon = next(index for index, text in enumerate(found) if text.tokens < 16)
    later = next(index for index, text in enumerate(found) if 16 < text.tokens < 32)
    for chosen, limit in ((soon, 16), (later, 32)):
        calls, cache = 0, full(tiny)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny._transformer, "forward", counted)
            tiny.generate(["x"], cache, PromptNoise(0, (chosen,)))
        assert calls == limit
        heads, padding = tiny.spec.all_heads, 7
        held = [row[-1] for row in cache.ledger.tokens_after]
        assert held == [heads * (end - padding) if end < 8 + limit else 0 for end in tiny.spec.ends]
        assert cache.ledger.last_tokens == max(held)
        use = cache.ledger.measure_use(tiny.spec, Budget.parse(1, tiny.spec), [0])
        assert use == (cache.ledger.last_tokens, cache.ledger.last_bytes, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("qwen3")
    official = write_folder(path)
    write_tokenizer(path)
    return path, official


def reading(path: Path, **more: Any) -> Qwen3Model:
    sources = {"weights": Source("model.sources.weights", str(path))}
    settings = {"prompt_tokens": 7, "max_tokens": 30, "chunk": 8, **more}
    return Qwen3Model("small", SHAPE, TextSampling(0), sources, **settings)


@pytest.mark.parametrize("thinking", [True, False])
def test_greedy_texts_are_those_of_transformers(folder: tuple[Path, Any], thinking: bool) -> None:
    path, official = folder
    one = reading(path, thinking=thinking)
    one.load("cpu")
    check_greedy(one, official)
    assert one.weights_sha256 == hash_files(
        sorted([*path.glob("*.json"), *path.glob("*.safetensors"), *path.glob("*.jinja")])
    )
    assert list(one.calls) == ["text", "transformer", "decode"]


def test_tokens_of_texts_with_a_chat_and_without_one(folder: tuple[Path, Any], tmp_path: Path) -> None:
    text = reading(folder[0])._read_text("cpu")[0]
    assert text.decode([4, 7, 10, 5, 8, 1]) == "<think> one plus </think> two"
    assert (text.ends, text.pad) == ((1, 0), 0)
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: .* contains no tokenizer with a chat"):
        reading(tmp_path).check_prompts(PROMPTS)
    write_tokenizer(tmp_path, None)
    with pytest.raises(WeightsError, match=r"\(no chat template\); it must be the model's folder"):
        reading(tmp_path).check_prompts(PROMPTS)
    text, _ = reading(tmp_path, chat=False)._read_text("cpu")
    assert text.encode("one plus two") == [WORDS.index(word) for word in ("one", "plus", "two")]


def test_a_missing_package_names_its_extra(folder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WeightsError, match=r"model\.sources\.weights: install the `text` extra"):
        reading(folder[0]).load("cpu")


def test_another_number_in_config_json_is_refused(folder: tuple[Path, Any], tmp_path: Path) -> None:
    """The right value is the one that transformers' own file has."""
    path, official = folder
    copy = shutil.copytree(path, tmp_path / "copy")
    settings = official.config.to_dict() | {"sliding_window": 4096, "use_sliding_window": False}
    for right in (settings, {"max_position_embeddings": 7}):
        (copy / "config.json").write_text(json.dumps(right))
        reading(copy).load("cpu")
    for change, line in (
        ({"rope_theta": 5e6}, r"rope_theta is 5000000\.0, but model\.transformer\.rope_base is 1000000\.0; set "),
        ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters\.rope_theta is 10000\.0, but "),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.type is yarn, but kvbench computes "),
        ({"num_attention_heads": 1}, r"num_attention_heads is 1, but model\.transformer\.heads is 4; set "),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is \['full_attention', 'sli"),
    ):  # fmt: skip
        (copy / "config.json").write_text(json.dumps(settings | change))
        with pytest.raises(WeightsError, match=rf"^model\.sources\.weights: .*config\.json: {line}"):
            reading(copy).check_files()
