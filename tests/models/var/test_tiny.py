"""The embedded class-conditional model: small, right in most pictures, the same in any batch."""

from functools import lru_cache

import pytest
from torch import Tensor

from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.models.var.model import VARModel
from kvbench.prompts.scene_classes import SceneClasses
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import exact
from tests.support.engine import open_cache
from tests.support.places import ASSETS
from tests.support.small_models import load

PROMPTS = SceneClasses(30).load()


@lru_cache
def tiny() -> VARModel:
    return load("model=var_tiny")


def draw(method: Method, chosen: list[int]) -> Tensor:
    model, budget = tiny(), 1 if isinstance(method, Full) else 0.2
    cache = open_cache(method, model.spec, budget)
    return model.generate([PROMPTS[i].text for i in chosen], cache, PromptNoise(3, chosen))


def test_it_is_small_and_has_the_scales_of_infinity_tiny() -> None:
    held = sum(path.stat().st_size for path in (ASSETS / "var_tiny").glob("*.safetensors"))
    assert held <= 8e6
    assert tiny().spec.lengths == tuple(side**2 for side in (1, 2, 3, 4, 5, 6, 8, 10, 12))


@pytest.mark.slow
def test_most_pictures_hold_exactly_what_the_class_names() -> None:
    images = draw(Full(), list(range(30))).numpy()
    right = [exact(detect(image), prompt.meta) for image, prompt in zip(images, PROMPTS, strict=True)]
    assert sum(right) >= 28


@pytest.mark.parametrize(
    "method", [Full(), SnapKV(sinks=2), StreamingLLM(sinks=2)], ids=lambda method: type(method).__name__
)
def test_a_picture_is_the_same_in_any_batch(method: Method) -> None:
    together = draw(method, [0, 1])
    for index in range(2):
        alone = draw(method, [index])[0]
        assert (alone.int() - together[index].int()).abs().max() <= 1
