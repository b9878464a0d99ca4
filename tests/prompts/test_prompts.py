"""Prompt sets: classes in order, what is calibrated on, names."""

import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.forced.text import OWN_OUTPUT
from kvbench.prompts.base import hash_prompts
from kvbench.prompts.imagenet import ImageNet, read_class_names
from kvbench.prompts.own import Own
from kvbench.prompts.scenes import SceneClasses, Scenes
from kvbench.scenes.exact import count_named


@settings(deadline=None)  # the first example imports torchvision
@given(
    classes=st.lists(st.integers(0, 999), min_size=1, max_size=9, unique=True),
    per_class=st.integers(1, 5),
    count=st.none() | st.integers(1, 60),
)
def test_the_first_prompts_cover_all_classes(classes: list[int], per_class: int, count: int | None) -> None:
    prompts = ImageNet(tuple(classes), per_class, count).load()
    assert len(prompts) == min(count or 10**6, len(classes) * per_class)
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    for prompt in prompts:
        assert prompt.text == str(classes[prompt.index % len(classes)])
        assert prompt.meta["class"] == int(prompt.text)
    seen = Counter(prompt.text for prompt in prompts)
    fewest = min(seen[str(number)] for number in classes)
    assert max(seen.values()) - fewest <= 1


@given(count=st.integers(1, 30), seed=st.integers(0, 99))
def test_calibration_draws_classes_by_seed(count: int, seed: int) -> None:
    prompts = ImageNet(tuple(range(100, 112)))
    one, other = prompts.load_others(count, seed), prompts.load_others(count, seed)
    assert one == other
    drawn = [int(prompt.text) for prompt in one]
    assert len(drawn) == count
    assert set(drawn) <= set(range(100, 112))
    assert len(set(drawn)) == min(count, 12)
    assert len({hash_prompts(ImageNet().load_others(10, seed + more)) for more in range(5)}) == 5


@pytest.mark.parametrize(("count", "held_out"), [(96, True), (512, False)])
def test_scenes_are_not_calibrated_on_what_is_evaluated(count: int, held_out: bool) -> None:
    prompts = Scenes(count, seed=3, held_out=held_out)
    evaluated = {prompt.text for prompt in prompts.load()}
    others = prompts.load_others(20, seed=1)
    assert len(others) == 20
    assert [prompt.index for prompt in others] == list(range(20))
    assert not evaluated & {prompt.text for prompt in others}
    assert others == prompts.load_others(20, seed=1)
    assert [prompt.text for prompt in others] != [prompt.text for prompt in prompts.load_others(20, seed=2)]


def test_several_images_of_a_scene_stand_one_after_another() -> None:
    single, several = Scenes(4, seed=3).load(), Scenes(4, seed=3, per_prompt=3).load()
    assert several == [
        replace(prompt, index=3 * prompt.index + image, meta={**prompt.meta, "image_index": image})
        for prompt in single
        for image in range(3)
    ]


def test_scene_classes_cover_all_pairs_and_name_them() -> None:
    prompts = SceneClasses(75).load()
    assert [prompt.text.split()[0] for prompt in prompts] == [str(index % 30) for index in range(75)]
    named = [count_named(prompt.text) for prompt in prompts]
    assert len({tuple(one) for one in named}) == 30
    for prompt, one in zip(prompts, named, strict=True):
        [(color, shape)] = one
        assert prompt.meta["include"] == [{"class": shape, "count": 1, "color": color}]
    others = SceneClasses(75).load_others(10, 1)
    assert [prompt.index for prompt in others] == list(range(10))
    assert hash_prompts(others) != hash_prompts(SceneClasses(75).load_others(10, 2))


def test_names_are_metadata_and_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ImageNet().load()) == 50_000
    prompts = ImageNet((207, 0), per_class=1)
    pytest.importorskip("torchvision")
    named = prompts.load()
    assert [prompt.meta for prompt in named] == [
        {"class": 207, "name": "golden retriever"},
        {"class": 0, "name": "tench"},
    ]
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    assert read_class_names() == []
    plain = prompts.load()
    assert [prompt.meta for prompt in plain] == [{"class": 207}, {"class": 0}]
    assert hash_prompts(plain) == hash_prompts(named)


def test_prompts_of_own_outputs_are_those_of_the_set() -> None:
    scenes = Scenes(count=3)
    prompts = Own(scenes).load()
    assert [prompt.text for prompt in prompts] == [prompt.text for prompt in scenes.load()]
    assert {prompt.reading for prompt in prompts} == {OWN_OUTPUT}
    assert Own(scenes).load_others(2, 0) == scenes.load_others(2, 0)
