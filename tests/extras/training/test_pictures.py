"""Pictures with names: shipped captions, drawings, names that are held out; whole trainings of image models."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from PIL import Image, ImageDraw

from kvbench.core.config import ConfigError
from kvbench.extras.training.images import BACKGROUNDS, PICTURES, draw_pictures
from kvbench.models.noise import PromptNoise
from kvbench.scenes.names import Name, find_vocabulary, read_names
from tests.scenes.test_names import write_names
from tests.support.places import ROOT
from tests.support.small_models import composed, full

SHIPPED = ROOT / "kvbench" / "assets" / "infinity_emoji" / "names.csv"
SHAPES = ("ball", "box", "bar", "hat")
TWENTY = [
    Name(
        f"{colour} {shape} on {ground}",
        "Toys",
        f"{5 * row + column}.png",
        ground,
        "train" if row else "held_out",
    )
    for row, shape in enumerate(SHAPES)
    for column, colour in enumerate(("red", "green", "blue", "black", "yellow"))
    for ground in BACKGROUNDS
]
"""Twenty pictures on every background, of which five are held out."""


def write_package(folder: Path) -> Path:
    """Write a different picture of each of the twenty."""
    pictures = folder / PICTURES
    pictures.mkdir(parents=True)
    for number in range(20):
        image = Image.new("RGBA", (64, 64))
        red, green = 20 + 9 * number % 200, 200 - 7 * number % 180
        ImageDraw.Draw(image).ellipse((4, 4, 60, 20 + number % 40), fill=(red, green, 90, 255))
        image.save(pictures / f"{number}.png")
    return folder


def test_the_shipped_names_are_unique_and_have_a_closed_vocabulary_that_is_trained_on() -> None:
    names, vocabulary = read_names(SHIPPED), find_vocabulary(str(SHIPPED))
    captions = [name.caption for name in names]
    assert len(set(captions)) == len(captions) == 8 * len({name.picture for name in names}) > 2300
    vocabulary.check(captions)
    assert max(len(vocabulary.tokenize(caption)) for caption in captions) <= vocabulary.longest
    assert {word for caption in captions for word in caption.split()} == set(vocabulary.words)
    assert {name.category for name in names} == {"Animals & Nature", "Food & Drink"}
    assert {name.background for name in names} == set(BACKGROUNDS)
    for name in names:
        assert re.fullmatch(rf"[a-z0-9]+( [a-z0-9]+)* on {name.background}", name.caption)
    with pytest.raises(ValueError, match=r"no word 'aple'; nearest: .*\bapple\b"):
        vocabulary.tokenize("red aple")
    trained = {word for name in names if name.split == "train" for word in name.caption.split()}
    held_out = [name.caption.split() for name in names if name.split == "held_out"]
    assert 0.03 < len(held_out) / len(names) < 0.06
    assert {word for caption in held_out for word in caption} <= trained


def test_drawings_are_whole_pictures_in_a_corner_of_their_background(tmp_path: Path) -> None:
    colours = {"white": 255, "grey": 189}
    names = [Name(f"a{n}", "Food & Drink", f"{n}.png", colour, "train") for n, colour in enumerate(colours)]
    package = write_package(tmp_path)
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
    with pytest.raises(ValueError, match=r"^background 'puce' must be one of white, yellow, "):
        draw_pictures(package, [names[0]._replace(background="puce")], 1, 0)
    Image.new("RGB", (32, 64)).save(package / PICTURES / "1.png")
    with pytest.raises(ValueError, match=r"^img/google/64/1.png: 32 x 64, needed: 64 x 64"):
        draw_pictures(package, names, 1, 0)


STAGE = "{_target_: kvbench.extras.training.transformer.Stage, scales: 3, batch: 2, steps: 2}"
STAGES = f"train.transformer.stages=[{STAGE}]"
FREE = "+train.tokenizer.free=1"
FEW = (
    "train.compiled=false", "train.threads=1", "train.tokenizer.steps=2", "train.tokenizer.batch=2", "device=cpu",
)  # fmt: skip
INFINITY = (
    "model.transformer.depth=1", "model.text_layers=1", "model.tokenizer.mixers=1", "model.tokenizer.base=32",
    "model.tokenizer.encoder_widths=[32,32]", "model.tokenizer.decoder_widths=[32,32]",
)  # fmt: skip
SMALL = ("model=infinity_emoji", *INFINITY)
WIDTHS = ("model.transformer.depth=1", "model.tokenizer.widths=[32,32]")
TRAININGS = {
    "infinity_emoji": (INFINITY, ("train.pool=160", STAGES.replace("scales: 3", "scales: 7"))),
    "infinity_tiny": (
        INFINITY,
        (
            "train.pool=8",
            STAGES,
            "train.features.steps=1",
            "train.features.batch=2",
            "+train.features.test=2",
        ),
    ),
    "llamagen_tiny": (
        (*WIDTHS, "model.text_layers=1"),
        ("train.pool=8", "train.transformer.steps=2", "train.transformer.batch=2", FREE),
    ),
    "var_tiny": (WIDTHS, ("train.pool=8", STAGES, FREE)),
}
"""Small models of the same classes as the one that a recipe is for, and few steps of it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_writes_weights_that_the_model_reads(name: str, tmp_path: Path) -> None:
    own, few = TRAININGS[name]
    small = (f"model={name}", *own)
    if name == "infinity_emoji":
        write_names(tmp_path / "own.csv", TWENTY)
        small += (f"model.captions={tmp_path / 'own.csv'}",)
        few += (f"train.pictures={write_package(tmp_path / 'package')}",)
    config = composed(*small, f"train={name}", f"train.out={tmp_path}", *FEW, *few)
    model, shipped = instantiate(config.model), instantiate(composed(f"model={name}").model)
    assert instantiate(config.train).train(model) == tmp_path
    sources = [
        f"model.sources.{part}.path={tmp_path / Path(source.path).name}"
        for part, source in shipped.sources.items()
    ]
    trained = instantiate(composed(*small, *sources).model)
    for one in (shipped, trained):
        one.load("cpu")
    assert trained.weights_sha256 != shipped.weights_sha256
    if name == "infinity_emoji":
        caption = [TWENTY[0].caption]
        trained.check_prompts(caption)
        assert trained.generate(caption, full(trained), PromptNoise(0, (0,))).shape == (1, 64, 64, 3)


def test_held_out_names_are_never_drawn_for_training(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package")
    write_names(tmp_path / "own.csv", TWENTY)
    config = composed(
        "train=infinity_emoji", f"train.pictures={package}", f"train.out={tmp_path}", "train.pool=160"
    )
    model = instantiate(composed(*SMALL, f"model.captions={tmp_path / 'own.csv'}").model)
    _, captions = instantiate(config.train)._draw(model)
    held_out = {name.caption for name in TWENTY if name.split == "held_out"}
    assert set(captions) == {name.caption for name in TWENTY} - held_out
    assert max(Counter(captions).values()) - min(Counter(captions).values()) <= 1


def test_names_without_pictures_to_train_on_are_refused(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.csv"
    write_names(held_out, TWENTY[:3])
    config = composed(
        *SMALL, "train=infinity_emoji", f"train.pictures={tmp_path}", f"train.out={tmp_path}", *FEW
    )
    for captions, why in (
        ("scenes", "^model.captions=scenes: must be a file with names of pictures to train on"),
        ("none.csv", "^model.captions=none.csv: cannot be read"),
        (str(held_out), f"^model.captions={held_out}: must be a file with names of pictures"),
        (str(SHIPPED), r"^train.pictures=.*: cannot be read \(.*\.png"),
    ):
        model = {**config.model, "captions": captions}
        with pytest.raises(ConfigError, match=why):
            instantiate(config.train).train(instantiate(model))
