"""The embedded language models: small, right with a full cache, the same in any batch; the cache decides."""

from collections.abc import Sequence
from functools import lru_cache

import pytest

from kvbench.eval.text.answers import find_answer
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.rkv import RKV
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.models.outputs import Text
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.prompts.base import Prompt
from kvbench.prompts.math_tiny import MathTiny, NotesTiny
from tests.support.engine import open_cache
from tests.support.places import ASSETS
from tests.support.small_models import load

PROBLEMS = MathTiny(16, seed=7).load()


@lru_cache
def tiny(*overrides: str) -> Qwen3Model:
    return load("model=reasoner_tiny", *overrides)


def write(method: Method, chosen: Sequence[int], budget: float = 1, *overrides: str) -> list[Text]:
    model = tiny(*overrides)
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
