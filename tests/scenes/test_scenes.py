"""The scenes world: the detector reads back what was drawn, and captions, lines and pictures agree."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage

from kvbench.eval.geneval.rules import judge_image
from kvbench.scenes import grammar
from kvbench.scenes.detector import detect
from kvbench.scenes.world import BACKGROUNDS, COLORS, SHAPES, SIDE, Object, Scene, render

Image = NDArray[np.uint8]


def drawn(count: int, seed: int, **choice: Any) -> list[tuple[Scene, str, grammar.Meta]]:
    rng = np.random.default_rng(seed)
    return [grammar.sample(rng, grammar.TASKS[i % 6], **choice) for i in range(count)]


def untouched(image: Image) -> Image:
    return image


def blurred(image: Image) -> Image:
    return ndimage.gaussian_filter(image.astype(float), (1, 1, 0)).round().astype(np.uint8)


def noisy(image: Image) -> Image:
    noise = np.random.default_rng(0).normal(0, 6, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("degrade", "pairs"),
    [(untouched, None), (blurred, None), (noisy, None), (untouched, grammar.HELD_OUT_PAIRS)],
)
def test_the_detector_reads_every_scene_back(degrade: Callable[[Image], Image], pairs: Any) -> None:
    for scene, caption, _ in drawn(120, seed=3, pairs=pairs):
        found = Counter((item.label, item.color) for item in detect(degrade(render(scene))))
        assert found == Counter((item.shape, item.color) for item in scene.objects), caption


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_every_shape_in_every_colour(shape: str, color: str, background: str) -> None:
    for radius in (13.0, 17.0, 23.0):
        (item,) = detect(render(Scene((Object(shape, color, 40.3, 52.8, radius),), background)))
        assert (item.label, item.color, item.score) == (shape, color, 1.0)
        assert item.mask.shape == (SIDE, SIDE)
        left, top, right, bottom = item.box
        assert abs((left + right) / 2 - 40.3) < 2
        assert abs((top + bottom) / 2 - 52.8) < 4
        rows, columns = np.nonzero(item.mask)
        assert (left, top) == (columns.min(), rows.min())
        assert (right, bottom) == (columns.max() + 1, rows.max() + 1)


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_nothing_is_found_where_nothing_is(background: str) -> None:
    assert detect(render(Scene((), background))) == []
    speck = render(Scene((Object("square", "red", 48, 48, 3),), background))
    assert detect(speck) == []


@pytest.mark.parametrize("relation", grammar.RELATIONS)
def test_lines_judge_their_own_picture_correct(relation: str) -> None:
    for scene, caption, line in drawn(48, seed=6, relations=(relation,)):
        correct, reasons = judge_image(detect(render(scene)), line)
        assert correct, (caption, reasons)


@pytest.mark.parametrize("relation", grammar.RELATIONS)
def test_relations_are_those_of_the_geometry(relation: str) -> None:
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[relation]
    rng = np.random.default_rng(8)
    for _ in range(20):
        scene, caption, line = grammar.sample(rng, "position", relations=(relation,))
        first, second = scene.objects
        dx, dy = first.x - second.x, first.y - second.y
        signed = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
        assert signed > abs(dy if "of" in relation else dx)
        assert caption.startswith(f"a {first.color} {first.shape} {relation} a {second.color} {second.shape}")
        second_clause, first_clause = cast(list[dict[str, object]], line["include"])
        wrong = {**line, "include": [second_clause, {**first_clause, "position": [opposite, 0]}]}
        assert not judge_image(detect(render(scene)), wrong)[0]
        assert not judge_image(detect(render(Scene((), "light"))), line)[0]


@given(st.integers(0, 10**6), st.sampled_from(grammar.TASKS))
@settings(max_examples=100, deadline=None)
def test_captions_are_words_of_the_vocabulary_and_objects_do_not_touch(seed: int, task: str) -> None:
    scene, caption, line = grammar.sample(np.random.default_rng(seed), task)
    numbers = grammar.VOCABULARY.tokenize(caption)
    assert numbers[-1] == 1
    assert 0 not in numbers
    assert len(numbers) <= grammar.VOCABULARY.longest
    assert " ".join(grammar.VOCABULARY.words[number - 2] for number in numbers[:-1]) == caption
    assert (line["tag"], line["prompt"]) == (task, caption)
    for i, one in enumerate(scene.objects):
        assert one.r < one.x < SIDE - one.r
        assert one.r < one.y < SIDE - one.r
        for other in scene.objects[:i]:
            assert max(abs(one.x - other.x), abs(one.y - other.y)) > one.r + other.r + 2


def test_captions_that_cannot_be_read_are_refused() -> None:
    assert grammar.VOCABULARY.tokenize("A Red circle") == grammar.VOCABULARY.tokenize("a red circle")
    for caption, why in (
        ("a red, circle", "no word 'red,'"),
        ("<pad>", "no word"),
        ("a " * 14, "at most 13"),
    ):
        with pytest.raises(ValueError, match=why):
            grammar.VOCABULARY.tokenize(caption)


def test_the_pool_does_not_depend_on_the_number_of_processes() -> None:
    images, captions = grammar.pool(1300, seed=5)
    again, same = grammar.pool(1300, seed=5, processes=2)
    assert images.shape == (1300, SIDE, SIDE, 3)
    assert np.array_equal(images, again)
    assert captions == same
    assert np.array_equal(grammar.pool(1000, seed=5)[0], images[:1000])
    assert not np.array_equal(grammar.pool(10, seed=6)[0], images[:10])


def named_pairs(caption: str) -> set[tuple[str, str]]:
    words = ["cross" if word == "crosses" else word.removesuffix("s") for word in caption.split()]
    words = ["cross" if word == "cros" else word for word in words]
    return {(a, b) for a, b in pairwise(words) if a in COLORS and b in SHAPES}


def test_training_never_shows_a_held_out_pair() -> None:
    _, captions = grammar.pool(1000, seed=2)
    shown = set().union(*map(named_pairs, captions))
    assert shown == {(a, b) for a in COLORS for b in SHAPES} - set(grammar.HELD_OUT_PAIRS)
    _, counted = grammar.pool(200, mix={"counting": 1.0})
    assert all(caption.split()[0] in grammar.NUMBERS.values() for caption in counted)


@pytest.mark.parametrize("held_out", [False, True])
def test_evaluation_prompts_are_balanced(held_out: bool) -> None:
    lines = grammar.evaluation_prompts(96, seed=1, held_out=held_out)
    assert Counter(line["tag"] for line in lines) == dict.fromkeys(grammar.TASKS, 16)
    for line in lines:
        pairs = named_pairs(str(line["prompt"]))
        assert bool(pairs & set(grammar.HELD_OUT_PAIRS)) == held_out
    assert lines == grammar.evaluation_prompts(96, seed=1, held_out=held_out)
    assert lines[:12] == grammar.evaluation_prompts(12, seed=1, held_out=held_out)
    assert lines != grammar.evaluation_prompts(96, seed=2, held_out=held_out)
