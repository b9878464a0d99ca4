"""Soft-TIFA on the scenes world: questions from captions, answered with probabilities by a detector.

Verdicts of `detect` and of GenEval's rules change where a probability is 0.5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.alignment.soft_tifa import Atom, Grade, Questions, SoftTifa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.geneval.rules import MIN_SHARE, find_direction
from kvbench.scenes.detector import MIN_OVERLAP, MIN_SATURATION, Region, find_regions
from kvbench.scenes.exact import count_named, read_captions
from kvbench.scenes.grammar import NUMBERS, RELATIONS, pluralise
from kvbench.scenes.world import BACKGROUNDS, COLORS, SHAPES

SHAPE_SCALE = 0.04
"""Difference of overlaps that makes one shape e times as probable as another."""
COLOR_SCALE = 30.0
"""Difference of colour distances, summed over 8-bit channels, that makes one colour e times as probable as another."""
POSITION_SCALE = 0.1
"""Share of the distance in a relation's direction that changes the relation's odds by a factor e."""


@dataclass(frozen=True)
class DetectedScene:
    """Detected regions of an image, and the brightness of its background.

    Attributes:
        objects: connected saturated regions.
        brightness: median over all unsaturated pixels of the mean over channels, 0 to 255.
    """

    objects: Sequence[Region]
    brightness: float

    def shape(self, shape: str) -> NDArray[np.float64]:
        """Return the probability that each object has a shape, float64 [objects]."""
        return np.array([_soften(o.overlaps, SHAPE_SCALE, MIN_OVERLAP)[shape] for o in self.objects])

    def color(self, color: str) -> NDArray[np.float64]:
        """Return the probability that each object has a colour, float64 [objects]."""
        nearness = [{name: -far for name, far in o.distances.items()} for o in self.objects]
        return np.array([_soften(near, COLOR_SCALE)[color] for near in nearness])

    def presence(self, shape: str) -> float:
        """Return the probability that some object has a shape."""
        return float(1 - np.prod(1 - self.shape(shape)))


@dataclass(frozen=True)
class SceneTifa(SoftTifa):
    """`geneval2[scenes]`: Soft-TIFA on captions of the scenes grammar by the programmatic detector.

    Probabilities are computed from overlaps with shape templates, distances to named colours, shares of a distance in a
    direction, and the brightness of the background. Values are not comparable with those from other judges.
    """

    protocol: ClassVar[str] = "scenes"
    meta_keys: ClassVar[tuple[str, ...]] = ("tag", "prompt")
    part_names: ClassVar[tuple[str, ...]] = (
        *(f"atoms-{number}" for number in range(2, 7)),
        *("object", "count", "attribute", "position"),
    )

    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions about each caption."""
        return [make_questions(caption) for caption in read_captions(images)]

    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Return the detector, which needs no files and runs on the CPU."""
        return grade, {}


def make_questions(caption: str) -> Questions:
    """Return the questions about a caption; as in GenEval2, `a` has a question but does not count as an atom.

    Raises:
        ValueError: the caption is not from the grammar of scenes.
    """
    named = count_named(caption)
    shapes = [shape for _, shape in named]
    if len(set(shapes)) < len(shapes):
        raise ValueError(f"prompt {caption!r}: names one shape twice")
    words = {1: "one", **NUMBERS}
    atoms = []
    for (color, shape), count in named.items():
        many = pluralise(shape)
        if count not in words:
            raise ValueError(f"prompt {caption!r}: names {count} {many}, at most {max(words)} are possible")
        atoms += [
            Atom(f"Are there any {many} in the image?", "Yes", "object"),
            Atom(f"How many {many} are in the image?", words[count], "count"),
            Atom(f"Are all {many} in the image {color}?", "Yes", "attribute"),
        ]
    atoms += [
        Atom(f"Is the {shapes[0]} {relation} the {shapes[1]}?", "Yes", "position")
        for relation in RELATIONS
        if f" {relation} " in caption
    ]
    atoms += [
        Atom(f"Is the background {name}?", "Yes", "attribute")
        for name in BACKGROUNDS
        if caption.endswith(f"on a {name} background")
    ]
    return Questions(tuple(atoms), sum(atom.answer != "one" for atom in atoms))


def grade(pixels: NDArray[np.uint8], atoms: Sequence[Atom]) -> list[float]:
    """Return the probability of the correct answer to each question about pixels uint8 [H, W, 3].

    Raises:
        ValueError: a question is not of the form of `make_questions`.
    """
    plain = pixels[np.ptp(pixels, axis=2) <= MIN_SATURATION]
    brightness = float(np.median(plain.mean(-1))) if len(plain) else 0.0
    scene = DetectedScene(find_regions(pixels), brightness)
    return [_answer(scene, atom) for atom in atoms]


def count_probability(chances: Sequence[float], count: int) -> float:
    """Return the probability that exactly `count` of several independent events occur."""
    distribution = np.array([1.0])
    for chance in chances:
        distribution = np.convolve(distribution, (1 - chance, chance))
    return float(distribution[count]) if count < len(distribution) else 0.0


def _answer(scene: DetectedScene, atom: Atom) -> float:
    words = atom.question.removesuffix("?").split()
    singular = {pluralise(shape): shape for shape in SHAPES}
    match words:
        case ["Are", "there", "any", many, *_]:
            return scene.presence(singular[many])
        case ["How", "many", many, *_]:
            number = {"one": 1, **{word: count for count, word in NUMBERS.items()}}[atom.answer]
            return count_probability(scene.shape(singular[many]).tolist(), number)
        case ["Are", "all", many, "in", "the", "image", color] if color in COLORS:
            return _grade_color(scene, singular[many], color)
        case ["Is", "the", "background", name]:
            return _grade_background(scene, name)
        case ["Is", "the", first, *relation, "the", second]:
            return _grade_position(scene, first, " ".join(relation), second)
        case _:
            raise ValueError(f"the detector cannot answer {atom.question!r}")


def _grade_color(scene: DetectedScene, shape: str, color: str) -> float:
    """Return the expected share of a shape's objects with the colour, times the shape's presence."""
    chances = scene.shape(shape)
    if not len(chances):
        return 0.0
    return scene.presence(shape) * float(chances @ scene.color(color) / chances.sum())


def _grade_position(scene: DetectedScene, first: str, relation: str, second: str) -> float:
    """Return the largest probability over pairs of objects that both shapes are present and the relation holds."""
    ours, theirs = scene.shape(first), scene.shape(second)
    best = 0.0
    for i, j in permutations(range(len(scene.objects)), 2):
        share = find_direction(scene.objects[i].box, scene.objects[j].box)[relation]
        holds = 1 / (1 + np.exp((MIN_SHARE - share) / POSITION_SCALE))
        best = max(best, float(ours[i] * theirs[j] * holds))
    return best


def _grade_background(scene: DetectedScene, name: str) -> float:
    """Return the position of the brightness between the other background (0) and the named background (1)."""
    [other] = [level for key, level in BACKGROUNDS.items() if key != name]
    return float(np.clip((scene.brightness - other) / (BACKGROUNDS[name] - other), 0, 1))


def _soften(values: Mapping[str, float], scale: float, none: float | None = None) -> dict[str, float]:
    """Return the softmax of values / scale by name; `none` is the value of an extra choice that is not returned."""
    logits = np.array([*values.values(), *([] if none is None else [none])]) / scale
    weights = np.exp(logits - logits.max())
    return dict(zip(values, (weights / weights.sum()).tolist(), strict=False))
