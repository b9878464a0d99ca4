"""The exact measure: a caption's objects, all of them and no others."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvbench.scenes import grammar
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import count_named, exact
from kvbench.scenes.world import COLORS, SHAPES, Object, Scene, render


@pytest.mark.parametrize("pairs", [None, grammar.HELD_OUT_PAIRS])
def test_every_scene_is_exact_for_its_own_caption(pairs: tuple[grammar.Pair, ...] | None) -> None:
    rng = np.random.default_rng(1)
    for i in range(150):
        scene, caption, line = grammar.sample(rng, grammar.TASKS[i % 6], pairs=pairs)
        assert count_named(caption) == Counter((item.color, item.shape) for item in scene.objects), caption
        assert exact(detect(render(scene)), line), caption


@pytest.mark.parametrize("task", grammar.TASKS)
def test_one_wrong_object_is_noticed(task: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(10):
        scene, caption, line = grammar.sample(rng, task)
        first, *rest = scene.objects
        color = next(name for name in COLORS if name != first.color)
        shape = next(name for name in SHAPES if name != first.shape)
        for objects in (rest, [replace(first, color=color), *rest], [replace(first, shape=shape), *rest]):
            assert not exact(detect(render(Scene(tuple(objects), scene.background))), line), caption


def test_an_extra_object_is_noticed_and_the_relation_is_not() -> None:
    ring, cross = Object("ring", "red", 25, 25, 17), Object("cross", "blue", 71, 25, 17)
    extra = Object("cross", "blue", 71, 71, 17)
    line: grammar.Meta = {"prompt": "a red ring right of a blue cross on a dark background"}
    assert exact(detect(render(Scene((ring, cross), "dark"))), line)
    assert not exact(detect(render(Scene((ring, cross, extra), "dark"))), line)


def test_numbers_and_plurals_count() -> None:
    assert count_named("three red rings") == {("red", "ring"): 3}
    assert count_named("two blue crosses on a light background") == {("blue", "cross"): 2}
    assert count_named("A red circle and a red square") == {("red", "circle"): 1, ("red", "square"): 1}


@pytest.mark.parametrize(
    ("caption", "why"),
    [
        ("", "names no object"),
        ("a dog", "names no object"),
        ("red ring", "'red' must be between"),
        ("a red", "'red' must be between"),
        ("a red blue ring", "'red' must be between"),
    ],
)
def test_captions_without_readable_objects_are_refused(caption: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        count_named(caption)
