"""Scores of drawn scenes, exact and graded: captions hold for their scenes, and every flaw is noticed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.scenes import grammar
from kvbench.scenes.detector import detect
from kvbench.scenes.exact import count_named, exact
from kvbench.scenes.graded import SceneTifa, count_probability, grade, make_questions
from kvbench.scenes.world import COLORS, SHAPES, Object, Scene, render
from tests.support.image_sets import make_noise, make_set, only, reason

RED_RING, BLUE_CROSS = Object("ring", "red", 26, 48, 17), Object("cross", "blue", 70, 48, 17)


def answers(caption: str, *objects: Object, background: str = "light") -> dict[str, float]:
    atoms = make_questions(caption).atoms
    found = grade(render(Scene(objects, background)), atoms)
    return {atom.question: value for atom, value in zip(atoms, found, strict=True)}


def test_questions_follow_the_caption() -> None:
    questions = make_questions("a red ring left of a blue cross on a dark background")
    assert [(atom.question, atom.answer, atom.skill) for atom in questions.atoms] == [
        ("Are there any rings in the image?", "Yes", "object"),
        ("How many rings are in the image?", "one", "count"),
        ("Are all rings in the image red?", "Yes", "attribute"),
        ("Are there any crosses in the image?", "Yes", "object"),
        ("How many crosses are in the image?", "one", "count"),
        ("Are all crosses in the image blue?", "Yes", "attribute"),
        ("Is the ring left of the cross?", "Yes", "position"),
        ("Is the background dark?", "Yes", "attribute"),
    ]
    assert questions.atomicity == 6
    three = make_questions("three green squares")
    assert (three.atoms[1].answer, three.atomicity) == ("three", 3)
    with pytest.raises(ValueError, match="names one shape twice"):
        make_questions("a red ring and a blue ring")


@pytest.mark.parametrize("held_out", [False, True])
def test_clean_scenes_are_right_and_others_wrong(held_out: bool) -> None:
    rng, pairs = np.random.default_rng(3), list(grammar.HELD_OUT_PAIRS) if held_out else None
    drawn = [grammar.sample(rng, grammar.TASKS[i % 6], pairs=pairs)[:2] for i in range(60)]
    for (scene, caption), (_, other) in pairwise(drawn):
        own = grade(render(scene), make_questions(caption).atoms)
        assert min(own) > 0.9
        if not count_named(other) <= count_named(caption):
            assert min(grade(render(scene), make_questions(other).atoms)) < 0.1


def test_every_flaw_lowers_its_own_answer() -> None:
    caption = "a red ring left of a blue cross on a light background"

    def wrong(*objects: Object, background: str = "light") -> set[str]:
        return {
            question for question, p in answers(caption, *objects, background=background).items() if p < 0.5
        }

    assert wrong(RED_RING, BLUE_CROSS) == set()
    assert wrong(RED_RING, BLUE_CROSS, background="dark") == {"Is the background light?"}
    recolored = Object("ring", "green", 26, 48, 17)
    assert wrong(recolored, BLUE_CROSS) == {"Are all rings in the image red?"}
    swapped = Object("ring", "red", 70, 48, 17), Object("cross", "blue", 26, 48, 17)
    assert wrong(*swapped) == {"Is the ring left of the cross?"}
    second = Object("ring", "red", 26, 80, 12)
    assert wrong(RED_RING, BLUE_CROSS, second) == {"How many rings are in the image?"}
    assert len(wrong(RED_RING)) == 4


def test_answers_fall_steadily_with_a_flaw() -> None:
    caption = "a red ring left of a blue cross"
    pixels = render(Scene((RED_RING, BLUE_CROSS), "light")).astype(float)
    atoms = make_questions(caption).atoms
    mask = next(one.mask for one in detect(pixels.astype(np.uint8)) if one.label == "ring")
    found = []
    for share in (0.0, 0.25, 0.5, 0.75):  # of the way from red to purple
        mixed = pixels.copy()
        mixed[mask] = (1 - share) * np.array([220, 45, 45]) + share * np.array([155, 60, 195])
        found.append(
            dict(zip((a.question for a in atoms), grade(mixed.astype(np.uint8), atoms), strict=True))
        )
    red = [one["Are all rings in the image red?"] for one in found]
    assert red == sorted(red, reverse=True)
    assert red[0] > 0.9 > red[2] > 0.2 > red[3]
    ring = [one["Are there any rings in the image?"] for one in found]
    assert ring == pytest.approx([ring[0]] * 4, abs=0.02)


@given(st.lists(st.floats(0, 1), max_size=6), st.integers(0, 6))
def test_counts_are_those_of_every_subset(chances: Sequence[float], count: int) -> None:
    expected = sum(
        np.prod([p if i in chosen else 1 - p for i, p in enumerate(chances)])
        for chosen in combinations(range(len(chances)), count)
    )
    assert count_probability(chances, count) == pytest.approx(float(expected), abs=1e-12)


def test_scenes_without_objects_score_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scenes, prompts, metas = zip(*(grammar.sample(rng, task) for task in grammar.TASKS), strict=True)
    empty = [np.full((96, 96, 3), 232, np.uint8)] * len(scenes)
    clean, bare = (
        only(SceneTifa(), make_set(tmp_path / name, images, prompts, metas)).scores
        for name, images in (("clean", list(map(render, scenes))), ("empty", empty))
    )
    assert clean["geneval2[scenes]"].value > 95
    assert bare["geneval2[scenes]"].value == bare["geneval2[scenes]/object"].value == 0
    other = make_noise(tmp_path / "other", [{}] * 2)
    assert "not captions of the scenes grammar" in reason(SceneTifa(), "skipped", other)


@pytest.mark.parametrize("pairs", [None, grammar.HELD_OUT_PAIRS])
def test_every_scene_is_exact_for_its_own_caption(pairs: tuple[grammar.Pair, ...] | None) -> None:
    rng = np.random.default_rng(1)
    for i in range(150):
        scene, caption, _ = grammar.sample(rng, grammar.TASKS[i % 6], pairs=pairs)
        assert count_named(caption) == Counter((item.color, item.shape) for item in scene.objects), caption
        assert exact(detect(render(scene)), caption)


@pytest.mark.parametrize("task", grammar.TASKS)
def test_one_wrong_object_is_noticed(task: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(10):
        scene, caption, _ = grammar.sample(rng, task)
        first, *rest = scene.objects
        color = next(name for name in COLORS if name != first.color)
        shape = next(name for name in SHAPES if name != first.shape)
        for objects in (rest, [replace(first, color=color), *rest], [replace(first, shape=shape), *rest]):
            assert not exact(detect(render(Scene(tuple(objects), scene.background))), caption)


def test_an_extra_object_is_noticed_and_the_relation_is_not() -> None:
    ring, cross = Object("ring", "red", 25, 25, 17), Object("cross", "blue", 71, 25, 17)
    extra = Object("cross", "blue", 71, 71, 17)
    caption = "a red ring right of a blue cross on a dark background"
    assert exact(detect(render(Scene((ring, cross), "dark"))), caption)
    assert not exact(detect(render(Scene((ring, cross, extra), "dark"))), caption)


def test_numbers_and_plurals_count() -> None:
    assert count_named("three red rings") == {("red", "ring"): 3}
    assert count_named("two blue crosses on a light background") == {("blue", "cross"): 2}
    assert count_named("A red circle and a red square") == {("red", "circle"): 1, ("red", "square"): 1}
    for caption, why in (
        ("a dog", "names no object"),
        ("red ring", "'red' must be"),
        ("a red", "'red' must be"),
    ):
        with pytest.raises(ValueError, match=why):
            count_named(caption)
