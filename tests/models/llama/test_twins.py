"""Decoders of the Llama kind give logits and greedy texts of transformers on the same folder, on the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.models.files.weights import Source
from kvbench.models.llama.model import LlamaModel
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.text_sampling import TextSampling
from tests.support import reference_qwen3 as reference
from tests.support.reference_llama import TWINS, write_twin
from tests.support.reference_qwen3 import END, WORDS
from tests.support.small_models import full

pytest.importorskip("transformers")
PROMPTS = [[5, 9, 20, 33, 41, 96, 7], [3, 88], [60, 61, 62, 2]]
each = pytest.mark.parametrize("name", TWINS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder and transformers' model, by name of the twin."""
    made = {}
    for name in TWINS:
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, write_twin(name, folder)
    return made


def reading(folder: Path, **settings: Any) -> LlamaModel:
    sources = {"weights": Source("model.sources.weights", str(folder))}
    sizes = {"prompt_tokens": 7, "max_tokens": 30, "chunk": 8, **settings}
    return LlamaModel(name="twin", sampling=TextSampling(0), sources=sources, **sizes)


@each
def test_logits_are_those_of_transformers(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, official = folders[name]
    one = reading(folder)
    one.load("cpu")
    answers = torch.randint(2, 97, (len(PROMPTS), 25), generator=torch.Generator().manual_seed(1))
    expected = reference.official_logits(official, PROMPTS, answers)
    with torch.inference_mode():
        found = reference.step_logits(one._transformer, PROMPTS, answers, torch.float32)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@each
def test_greedy_texts_are_those_of_transformers(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, official = folders[name]
    one = reading(folder, thinking=False)
    one.load("cpu")
    prompts = ["one plus two", "three"]
    asked = [[2, *(WORDS.index(word) for word in prompt.split()), 3, 4, 5] for prompt in prompts]
    tokens, exists = reference.pad(asked)
    drawn = official.generate(tokens, attention_mask=exists, do_sample=False, max_new_tokens=30)
    texts = one.generate(prompts, full(one), PromptNoise(0, range(2)))
    for text, row in zip(texts, drawn[:, tokens.shape[1] :].tolist(), strict=True):
        length = row.index(END) + 1 if END in row else len(row)
        assert (text.tokens, text.ended, text.text) == (length, END in row, one._text.decode(row[:length]))
