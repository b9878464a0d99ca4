"""The embedded models: small, right with a full cache, the same in any batch; the cache decides."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from kvbench.eval.text.answers import find_answer
from kvbench.extras.training.images import BACKGROUNDS
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.headkv import HeadKV
from kvbench.methods.rkv import RKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.models.outputs import Text
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.prompts.base import Prompt
from kvbench.prompts.math_tiny import MathTiny, NotesTiny
from kvbench.prompts.scenes import SceneClasses
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import exact
from kvbench.scenes.grammar import evaluation_prompts
from tests.support.engine import open_cache
from tests.support.places import ASSETS
from tests.support.small_models import configured, full, load

LINES = evaluation_prompts(18, seed=11)
PROMPTS: dict[str, Sequence[Prompt]] = {
    "llamagen_tiny": [Prompt(index, str(line["prompt"]), line) for index, line in enumerate(LINES)],
    "var_tiny": SceneClasses(30).load(),
}


@lru_cache
def tiny(name: str, rows: int = 16) -> Any:
    """A model; of fewer rows the weights of LlamaGen draw a strip."""
    model = configured(f"model={name}")
    if name == "llamagen_tiny":
        model = replace(model, transformer=replace(model.transformer, grid=(rows, 16)))
    model.load("cpu")
    return model


def draw(name: str, method: Method, chosen: list[int], rows: int = 16) -> Tensor:
    model, budget = tiny(name, rows), {"llamagen_tiny": 46, "var_tiny": 0.2}[name]
    cache = open_cache(method, model.spec, 1 if isinstance(method, Full) else budget)
    cache.prompts = chosen
    return model.generate([PROMPTS[name][i].text for i in chosen], cache, PromptNoise(3, chosen))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("llamagen_tiny", 16), ("var_tiny", 28)])
def test_most_pictures_hold_exactly_what_the_prompt_names(name: str, least: int) -> None:
    prompts = PROMPTS[name]
    images = draw(name, Full(), list(range(len(prompts)))).numpy()
    right = [
        exact(detect(image), str(prompt.meta["prompt"]))
        for image, prompt in zip(images, prompts, strict=True)
    ]
    assert sum(right) >= least


@pytest.mark.parametrize(
    ("name", "method"), [("llamagen_tiny", HeadKV(sinks=1)), ("var_tiny", SnapKV(sinks=2))]
)
def test_a_picture_is_the_same_in_any_batch(name: str, method: Method) -> None:
    together = draw(name, method, [0, 1], rows=5)
    for index in range(2):
        alone = draw(name, method, [index], rows=5)[0]
        assert (alone.int() - together[index].int()).abs().max() <= 1
    assert (together[0].int() - together[1].int()).abs().max() > 50


@pytest.mark.parametrize(
    ("name", "channel"), [("red apple", 0), pytest.param("broccoli", 1, marks=pytest.mark.slow)]
)
def test_backgrounds_and_colours_of_pictures_are_the_named_ones(name: str, channel: int) -> None:
    model = load("model=infinity_emoji")
    prompts = [f"{name} on {colour}" for colour in BACKGROUNDS]
    images = model.generate(prompts, full(model), PromptNoise(0, range(len(prompts))))
    for image, colour in zip(np.asarray(images, np.float32), BACKGROUNDS.values(), strict=True):
        edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert np.abs(np.median(edge, 0) - colour).max() < 12
        others = np.delete(image, channel, -1).max(-1)
        assert (image[..., channel] > others + 40).mean() > 0.1


PROBLEMS = MathTiny(16, seed=7).load()


@lru_cache
def reasoner(*overrides: str) -> Qwen3Model:
    return load("model=reasoner_tiny", *overrides)


def write(method: Method, chosen: Sequence[int], budget: float = 1, *overrides: str) -> list[Text]:
    model = reasoner(*overrides)
    cache = open_cache(method, model.spec, budget)
    return model.generate([PROBLEMS[i].text for i in chosen], cache, PromptNoise(3, chosen))


def right(texts: Sequence[Text], problems: Sequence[Prompt] = PROBLEMS) -> int:
    answers = [problem.meta["answer"] for problem in problems]
    return sum(find_answer(text.text) == answer for text, answer in zip(texts, answers, strict=True))


@pytest.mark.parametrize(
    ("name", "prompts"), [("reasoner_tiny", MathTiny), ("reasoner_notes_tiny", NotesTiny)]
)
def test_it_is_small_and_its_prompts_fill_their_room(name: str, prompts: type[MathTiny]) -> None:
    folder = ASSETS / name / "model"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2e6
    model, texts = load(f"model={name}"), [problem.text for problem in prompts(16, seed=7).load()]
    model.check_prompts(texts)
    assert {len(model._text.encode(text)) for text in texts} == {model.prompt_tokens}


@pytest.mark.slow
def test_solutions_are_whole_chains_of_the_length_they_should_have() -> None:
    texts = write(Full(), range(len(PROBLEMS)))
    assert right(texts) == len(PROBLEMS)
    for text, problem in zip(texts, PROBLEMS, strict=True):
        assert text.ended
        assert text.tokens == 3 * int(str(problem.meta["moves"])) + 5


@pytest.mark.slow
def test_notes_need_more_than_the_prompt_and_the_newest_tokens() -> None:
    """Facts that the chain states and that are asked for at its end: a window has lost them, R-KV has not."""
    model, problems = load("model=reasoner_notes_tiny"), NotesTiny(16, seed=7).load()

    def count_right(method: Method, budget: float) -> int:
        cache = open_cache(method, model.spec, budget)
        texts = model.generate([problem.text for problem in problems], cache, PromptNoise(3, range(16)))
        return right(texts, problems)

    assert count_right(Full(), 1) >= 14
    assert count_right(StreamingLLM(sinks=1), 200) <= 2
    assert count_right(RKV(sinks=1), 200) >= 12


@pytest.mark.slow
def test_with_a_quarter_of_the_tokens_the_method_decides() -> None:
    chosen = range(len(PROBLEMS))
    best = HardKV(selector="snapkv", select="top_k", calibration="none", queries=128)
    assert right(write(best, chosen, 200)) >= 14
    assert right(write(H2O(), chosen, 200)) >= 12
    assert right(write(StreamingLLM(sinks=0), chosen, 200)) <= 1


def test_a_text_is_the_same_in_any_batch() -> None:
    few = "model.max_tokens=160"
    together = write(H2O(), [0, 1], 100, few)
    assert [write(H2O(), [index], 100, few)[0] for index in (0, 1)] == together
    assert [text.tokens for text in together] == [160, 160]
