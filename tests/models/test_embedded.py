"""The embedded image models: small, right in most pictures, the same in any batch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from kvbench.extras.training.images import BACKGROUNDS
from kvbench.methods.full import Full
from kvbench.methods.headkv import HeadKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.prompts.base import Prompt
from kvbench.prompts.scenes import SceneClasses
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import exact
from kvbench.scenes.grammar import evaluation_prompts
from tests.support.engine import open_cache
from tests.support.marks import slow_except
from tests.support.places import ASSETS
from tests.support.small_models import configured, full, load


class Embedded(NamedTuple):
    """A model that ships: bytes of its files at most, tokens of its segments, and prompts, of which most are right."""

    size: float
    lengths: tuple[int, ...]
    prompts: Sequence[Prompt]
    right: int
    budget: float


LINES = evaluation_prompts(18, seed=11)
EMBEDDED = {
    "llamagen_tiny": Embedded(
        12e6,
        (14, *[16] * 15, 15),
        [Prompt(index, str(line["prompt"]), line) for index, line in enumerate(LINES)],
        16,
        46,
    ),
    "var_tiny": Embedded(
        8e6, tuple(side**2 for side in (1, 2, 3, 4, 5, 6, 8, 10, 12)), SceneClasses(30).load(), 28, 0.2
    ),
}
each = pytest.mark.parametrize("name", EMBEDDED)


@lru_cache
def tiny(name: str, rows: int = 16) -> Any:
    """A model; of fewer rows the weights of LlamaGen draw a strip."""
    model = configured(f"model={name}")
    if name == "llamagen_tiny":
        model = replace(model, transformer=replace(model.transformer, grid=(rows, 16)))
    model.load("cpu")
    return model


def draw(name: str, method: Method, chosen: list[int], rows: int = 16) -> Tensor:
    model, budget = tiny(name, rows), 1 if isinstance(method, Full) else EMBEDDED[name].budget
    cache = open_cache(method, model.spec, budget)
    cache.prompts = chosen
    return model.generate([EMBEDDED[name].prompts[i].text for i in chosen], cache, PromptNoise(3, chosen))


@each
def test_it_is_small_and_has_its_segments(name: str) -> None:
    held = sum(path.stat().st_size for path in (ASSETS / name).glob("*.safetensors"))
    assert held <= EMBEDDED[name].size
    assert configured(f"model={name}").spec.lengths == EMBEDDED[name].lengths


@pytest.mark.slow
@each
def test_most_pictures_hold_exactly_what_the_prompt_names(name: str) -> None:
    prompts = EMBEDDED[name].prompts
    images = draw(name, Full(), list(range(len(prompts)))).numpy()
    right = [
        exact(detect(image), str(prompt.meta["prompt"]))
        for image, prompt in zip(images, prompts, strict=True)
    ]
    assert sum(right) >= EMBEDDED[name].right


@pytest.mark.parametrize(
    ("name", "method"),
    slow_except(
        lambda case: isinstance(case[1], HeadKV) or case == ("var_tiny", SnapKV(sinks=2)),
        [
            *(("llamagen_tiny", one) for one in (HeadKV(sinks=1), Full(), SnapKV(sinks=1), StreamingLLM(sinks=1))),
            *(("var_tiny", one) for one in (SnapKV(sinks=2), Full(), StreamingLLM(sinks=2))),
        ],
    ),
)  # fmt: skip
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
