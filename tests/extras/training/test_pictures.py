"""Pictures with names: unique captions of plain words, names that are held out, drawings, a whole training."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from kvbench.core.config import ConfigError
from kvbench.extras.training.pictures import (
    BACKGROUNDS,
    CATEGORIES,
    PICTURES,
    clean_name,
    draw_pictures,
    hold_out,
    list_names,
)
from kvbench.models.noise import PromptNoise
from kvbench.scenes.names import Name, find_vocabulary, read_names, write_names
from tests.support.places import ROOT
from tests.support.small_models import composed, full

SHIPPED = ROOT / "kvbench" / "assets" / "infinity_emoji" / "names.csv"
Entry = tuple[str, str, str]
"""Name, category and subcategory of a picture."""
COLOURS = ("RED", "GREEN", "BLUE", "BLACK", "YELLOW")
SHAPES = ("BALL", "BOX", "BAR", "HAT")
TWENTY: tuple[Entry, ...] = tuple(
    (f"{colour} {shape}", "Food & Drink", "toy") for colour in COLOURS for shape in SHAPES
)


def write_package(folder: Path, entries: Sequence[Entry] = TWENTY, **changes: Any) -> Path:
    """Write the list and a different picture of each entry; `changes` are fields that all entries have instead."""
    pictures = folder / "img" / "google" / "64"
    pictures.mkdir(parents=True, exist_ok=True)
    for number in range(len(entries)):
        image = Image.new("RGBA", (64, 64))
        red, green = 20 + 9 * number % 200, 200 - 7 * number % 180
        ImageDraw.Draw(image).ellipse((4, 4, 60, 20 + number % 40), fill=(red, green, 90, 255))
        image.save(pictures / f"{number}.png")
    lines = [
        {"name": name, "category": category, "subcategory": part, "image": f"{number}.png"}
        for number, (name, category, part) in enumerate(entries)
    ]
    ordered = [{**line, "sort_order": number, **changes} for number, line in enumerate(lines)]
    (folder / "emoji.json").write_text(json.dumps(ordered[::-1]))
    return folder


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("RED APPLE", "red apple"),
        ("Jalapeño & Crème-Brûlée", "jalapeno and creme brulee"),
        ("T-Rex", "t rex"),
        ("Farmer\u2019s St. Bernard", "farmers st bernard"),
        ("SHRIMP: FRIED, COLD", "shrimp fried cold"),
    ],
)
def test_names_become_plain_words(name: str, caption: str) -> None:
    assert clean_name(name) == caption


@given(st.text(max_size=40))
@settings(deadline=None)
def test_a_cleaned_name_stays_and_is_words(name: str) -> None:
    caption = clean_name(name)
    assert re.fullmatch(r"( ?[a-z0-9]+)*", caption)
    assert clean_name(caption) == caption


def test_the_shipped_names_are_unique_and_have_a_closed_vocabulary() -> None:
    names, vocabulary = read_names(SHIPPED), find_vocabulary(str(SHIPPED))
    captions = [name.caption for name in names]
    assert len(set(captions)) == len(captions) == 8 * len({name.picture for name in names}) > 2300
    vocabulary.check(captions)
    assert max(len(vocabulary.tokenize(caption)) for caption in captions) <= vocabulary.longest
    assert {word for caption in captions for word in caption.split()} == set(vocabulary.words)
    assert {name.category for name in names} == CATEGORIES
    for name in names:
        assert re.fullmatch(rf"[a-z0-9]+( [a-z0-9]+)* on {name.background}", name.caption)
    with pytest.raises(ValueError, match=r"no word 'aple'; nearest: .*\bapple\b"):
        vocabulary.tokenize("red aple")


def test_words_of_the_shipped_held_out_names_are_trained_on() -> None:
    names = read_names(SHIPPED)
    parts = {split: [n.caption for n in names if n.split == split] for split in ("train", "held_out")}
    known = {word for caption in parts["train"] for word in caption.split()}
    assert 0.03 < len(parts["held_out"]) / len(names) < 0.06
    assert {word for caption in parts["held_out"] for word in caption.split()} <= known
    pictures = {name.caption.removesuffix(f" on {name.background}"): name.split for name in names}
    assert {name for name, split in pictures.items() if split == "held_out"} == hold_out(pictures)


@given(
    st.lists(
        st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3).map(" ".join), unique=True, max_size=40
    )
)
def test_held_out_words_are_left_in_other_names(captions: list[str]) -> None:
    held_out = hold_out(captions)
    left = {word for caption in captions if caption not in held_out for word in caption.split()}
    assert held_out <= set(captions)
    assert {word for caption in held_out for word in caption.split()} <= left


def test_names_are_in_order_and_once(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        [
            ("RED APPLE", "Food & Drink", "food-fruit"),
            ("Egypt Flag", "Flags", "country-flag"),
            ("RED PANDA", "Animals & Nature", "animal-mammal"),
            ("Red-Apple", "Food & Drink", "food-fruit"),
            ("TWIN", "Food & Drink", "food-fruit"),
            ("PEAR", "Food & Drink", "food-fruit"),
        ],
    )
    (package / PICTURES / "4.png").write_bytes((package / PICTURES / "2.png").read_bytes())
    found = list_names(package)
    assert [name.caption for name in found[:2]] == ["red apple on white", "red apple on yellow"]
    assert [(name.caption, *name[1:4]) for name in found if name.background == "grey"] == [
        ("red apple on grey", "Food & Drink", "0.png", "grey"),
        ("red panda on grey", "Animals & Nature", "2.png", "grey"),
        ("pear on grey", "Food & Drink", "5.png", "grey"),
    ]
    assert len(found) == 3 * len(BACKGROUNDS)
    write_names(tmp_path / "names.csv", found)
    assert read_names(tmp_path / "names.csv") == found


def test_drawings_are_whole_pictures_in_a_corner_of_their_background(tmp_path: Path) -> None:
    colours = {"white": 255, "grey": 189}
    names = [Name(f"a{n}", "Food & Drink", f"{n}.png", colour, "train") for n, colour in enumerate(colours)]
    package = write_package(tmp_path, TWENTY[:2])
    left = Image.new("RGBA", (64, 64))
    left.paste((200, 0, 0, 255), (0, 0, 32, 64))
    for n in range(2):
        left.save(package / PICTURES / f"{n}.png")
    images, captions = draw_pictures(package, names, 80, 3)
    assert captions == ["a0", "a1"] * 40
    again, _ = draw_pictures(package, names, 80, 3)
    assert torch.equal(images, again)
    assert not torch.equal(images, draw_pictures(package, names, 80, 4)[0])
    places = set()
    for image, level in zip(images, list(colours.values()) * 40, strict=True):
        red = (image.float() - torch.tensor([200.0, 0, 0])).abs().amax(-1) < 8
        behind = (image == level).all(-1)
        assert (red | behind).sum() > 0.94 * 64**2  # the edge is a blend of both
        rows, columns = (red.any(side).nonzero().flatten() for side in (1, 0))
        assert len(rows) == 56
        assert 26 <= len(columns) <= 29
        places.add((int(rows[0]), int(columns[0] - columns[0] % 4)))
    assert places == {(top, left) for top in (0, 8) for left in (0, 8, 28, 36)}
    wrong = [names[0]._replace(background="puce")]
    with pytest.raises(ValueError, match=r"^background 'puce' must be one of white, yellow, "):
        draw_pictures(package, wrong, 1, 0)


def test_a_package_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"emoji\.json"):
        list_names(tmp_path)
    write_package(tmp_path, TWENTY[:2])
    Image.new("RGB", (32, 64)).save(tmp_path / PICTURES / "1.png")
    with pytest.raises(ValueError, match=r"^img/google/64/1.png: 32 x 64, needed: 64 x 64"):
        list_names(tmp_path)
    for wrong in ("{}", "[1]", '[{"name": "A"}]', "no JSON", '[{"sort_order": "a"}]'):
        (tmp_path / "emoji.json").write_text(wrong)
        with pytest.raises(
            ValueError, match=r"^emoji\.json: (not a list of named pictures|names no pictures)"
        ):
            list_names(tmp_path)


FEW = (
    "train.pool=160", "train.compiled=false", "train.threads=1", "train.tokenizer.steps=2", "train.tokenizer.batch=2",
    "train.transformer.stages=[{_target_: kvbench.extras.training.transformer.Stage, scales: 7, batch: 2, steps: 2}]",
    "device=cpu",
)  # fmt: skip
SMALL = (
    "model=infinity_emoji", "model.transformer.depth=1", "model.text_layers=1", "model.tokenizer.mixers=1",
    "model.tokenizer.base=32", "model.tokenizer.encoder_widths=[32,32]", "model.tokenizer.decoder_widths=[32,32]",
)  # fmt: skip


@pytest.mark.slow
def test_a_training_on_twenty_pictures_gives_a_model_that_draws(tmp_path: Path) -> None:
    package, out = write_package(tmp_path / "package"), tmp_path / "out"
    recipe = ("train=infinity_emoji", f"train.pictures={package}", f"train.out={out}", *FEW)
    config = composed(*SMALL, *recipe)
    with pytest.raises(
        ConfigError,
        match=r"^train.pictures=.*: not the names of model.captions=pkg.* \(red ball on white\); ",
    ):
        instantiate(config.train).train(instantiate(config.model))
    own = (*SMALL, f"model.captions={out / 'names.csv'}")
    config = composed(*own, *recipe)
    model = instantiate(config.model)
    assert instantiate(config.train).train(model) == out
    names = read_names(out / "names.csv")
    assert [name.caption for name in names[::8]] == [f"{name.lower()} on white" for name, _, _ in TWENTY]
    sources = [f"model.sources.{part}.path={out / part}.safetensors" for part in model.sources]
    trained = instantiate(composed(*own, *sources).model)
    trained.check_prompts([names[0].caption])
    trained.load("cpu")
    images = trained.generate([names[0].caption], full(trained), PromptNoise(0, (0,)))
    assert images.shape == (1, 64, 64, 3)


def test_held_out_names_are_never_drawn_for_training(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package")
    config = composed(
        *SMALL, "train=infinity_emoji", f"train.pictures={package}", f"train.out={tmp_path}", *FEW
    )
    names = list_names(package)
    write_names(tmp_path / "own.csv", names)
    model = instantiate(composed(*SMALL, f"model.captions={tmp_path / 'own.csv'}").model)
    _, captions = instantiate(config.train)._draw(model, tmp_path)
    held_out = {name.caption for name in names if name.split == "held_out"}
    assert held_out
    assert set(captions) == {name.caption for name in names} - held_out
    assert max(Counter(captions).values()) - min(Counter(captions).values()) <= 1


@pytest.mark.parametrize("captions", ["scenes", "none.csv"])
def test_names_that_the_model_lacks_are_refused(captions: str, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package")
    config = composed(
        *SMALL, f"model.captions={captions}", "train=infinity_emoji", f"train.pictures={package}",
        f"train.out={tmp_path}", *FEW,
    )  # fmt: skip
    key = "train.pictures" if captions == "scenes" else "model.captions=none.csv"
    with pytest.raises(ConfigError, match=f"^{key}"):
        instantiate(config.train).train(instantiate(config.model))
    config.train.pictures, config.model.captions = str(tmp_path / "nowhere"), "scenes"
    with pytest.raises(ConfigError, match=r"^train.pictures=.*nowhere: cannot be read"):
        instantiate(config.train).train(instantiate(config.model))
