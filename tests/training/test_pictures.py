"""Pictures with names: unique captions of plain words, names that are held out, drawings, a whole training."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kvbench.core.config import ConfigError
from kvbench.models.noise import PromptNoise
from kvbench.scenes.names import Name, find_vocabulary, read_names, write_names
from kvbench.training.pictures import PICTURES, clean_name, draw_pictures, hold_out, list_names
from tests.support.pictures import TWENTY, write_package
from tests.support.places import ROOT
from tests.support.small_models import composed, full

SHIPPED = ROOT / "kvbench" / "assets" / "infinity_emoji" / "names.csv"


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("RED APPLE", "red apple"),
        ("Egypt Flag", "flag: egypt"),
        ("Bosnia & Herzegovina Flag", "flag: bosnia and herzegovina"),
        ("Côte d\u2019Ivoire Flag", "flag: cote divoire"),
        ("Congo - Brazzaville Flag", "flag: congo brazzaville"),
        ("St. Martin Flag", "flag: st martin"),
        ("MAN: RED HAIR", "man red hair"),
        ("KISS: WOMAN, MAN", "kiss woman man"),
        ("CLOCK FACE TWO-THIRTY", "clock face two thirty"),
    ],
)
def test_names_become_plain_words(name: str, caption: str) -> None:
    assert clean_name(name, flag=name.endswith("Flag")) == caption


@given(st.text(max_size=40), st.booleans())
@settings(deadline=None)
def test_a_cleaned_name_stays_and_is_words(name: str, flag: bool) -> None:
    caption = clean_name(name, flag=flag)
    assert re.fullmatch(r"(flag:)?( ?[a-z0-9]+)*", caption)
    assert clean_name(caption.removeprefix("flag: "), flag=False) == caption.removeprefix("flag:").strip()


def test_the_shipped_names_are_unique_and_have_a_closed_vocabulary() -> None:
    names, vocabulary = read_names(SHIPPED), find_vocabulary(str(SHIPPED))
    captions = [name.caption for name in names]
    assert len(set(captions)) == len(captions) > 1700
    assert len({name.picture for name in names}) == len(names)
    vocabulary.check(captions)
    assert max(len(vocabulary.tokenize(caption)) for caption in captions) <= vocabulary.longest
    assert {word for caption in captions for word in caption.split()} == set(vocabulary.words)
    assert len({name.category for name in names}) == 9
    for name in names:
        assert re.fullmatch(r"(flag: )?[a-z0-9]+( [a-z0-9]+)*", name.caption)
    with pytest.raises(ValueError, match=r"no word 'aple'; nearest: .*\bapple\b"):
        vocabulary.tokenize("red aple")


def test_words_of_the_shipped_held_out_names_are_trained_on() -> None:
    names = read_names(SHIPPED)
    parts = {split: [n.caption for n in names if n.split == split] for split in ("train", "held_out")}
    known = {word for caption in parts["train"] for word in caption.split()}
    assert 0.03 < len(parts["held_out"]) / len(names) < 0.06
    assert {word for caption in parts["held_out"] for word in caption.split()} <= known
    assert set(parts["held_out"]) == hold_out(name.caption for name in names)


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
            ("KEYCAP 1", "Symbols", "keycap"),
            ("Red-Apple", "Food & Drink", "food-fruit"),
            ("Twin Flag", "Flags", "country-flag"),
            ("PIRATE FLAG", "Flags", "flag"),
        ],
    )
    (package / PICTURES / "4.png").write_bytes((package / PICTURES / "1.png").read_bytes())
    found = list_names(package)
    assert [name[:3] for name in found] == [
        ("red apple", "Food & Drink", "0.png"),
        ("flag: egypt", "Flags", "1.png"),
        ("pirate flag", "Flags", "5.png"),
    ]
    write_names(tmp_path / "names.csv", found)
    assert read_names(tmp_path / "names.csv") == found


def test_drawings_are_whole_pictures_on_white(tmp_path: Path) -> None:
    names = [Name(f"a{n}", "Food & Drink" if n else "Objects", f"{n}.png", "train") for n in range(2)]
    package = write_package(tmp_path, TWENTY[:2])
    left = Image.new("RGBA", (64, 64))
    left.paste((200, 0, 0, 255), (0, 0, 32, 64))
    for n in range(2):
        left.save(package / PICTURES / f"{n}.png")
    images, captions = draw_pictures(package, names, 60, 3)
    assert captions == ["a0", "a1"] * 30
    again, _ = draw_pictures(package, names, 60, 3)
    assert torch.equal(images, again)
    assert not torch.equal(images, draw_pictures(package, names, 60, 4)[0])
    red = (images.float() - torch.tensor([200.0, 0, 0])).abs().amax(-1) < 8
    white = (images == 255).all(-1)
    area = red.sum((1, 2))
    assert (area > 0.4 * 0.8**2 * 64**2).all()
    assert (area < 0.51 * 64**2).all()
    assert len(set(area.tolist())) > 5
    assert ((red | white).sum((1, 2)) > 0.94 * 64**2).all()  # the edge is a blend of both
    mirrored = red[:, :, 40:].sum((1, 2)) > red[:, :, :24].sum((1, 2))
    assert not mirrored[::2].any()
    assert 3 < mirrored[1::2].sum() < 27


def test_a_package_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"emoji\.json"):
        list_names(tmp_path)
    write_package(tmp_path, TWENTY[:2])
    Image.new("RGB", (32, 64)).save(tmp_path / PICTURES / "1.png")
    with pytest.raises(ValueError, match=r"^img/google/64/1.png: 32 x 64, needed: 64 x 64"):
        list_names(tmp_path)
    for wrong in ("{}", "[1]", '[{"name": "A"}]', "no JSON", '[{"sort_order": "a"}]'):
        (tmp_path / "emoji.json").write_text(wrong)
        with pytest.raises(ValueError, match=r".+"):
            list_names(tmp_path)


FEW = (
    "train.pool=40", "train.compiled=false", "train.threads=1", "train.tokenizer.steps=2", "train.tokenizer.batch=2",
    "train.transformer.stages=[{_target_: kvbench.training.stages.Stage, scales: 7, batch: 2, steps: 2}]",
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
        ConfigError, match=r"^train.pictures=.*: not the names of model.captions=pkg.* \(red ball\); "
    ):
        instantiate(config.train).train(instantiate(config.model))
    own = (*SMALL, f"model.captions={out / 'names.csv'}")
    config = composed(*own, *recipe)
    model = instantiate(config.model)
    assert instantiate(config.train).train(model) == out
    names = read_names(out / "names.csv")
    assert [name.caption for name in names] == [name.lower() for name, _, _ in TWENTY]
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
