"""Soft-TIFA on the scenes world: questions from captions, and a detector that answers them with probabilities.

A probability of 0.5 marks the point at which the verdict of `detect` and of GenEval's rules changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.alignment.soft_tifa import Atom, Grade, Questions, SoftTifa
from kvbench.eval.files.images import ImageSet
from kvbench.eval.geneval.rules import LEAST_SHARE, find_direction
from kvbench.eval.protocol.base import SkipEvaluation
from kvbench.scenes.detector import OVERLAP, SATURATION, Component, find_components
from kvbench.scenes.exact import count_named
from kvbench.scenes.grammar import NUMBERS, RELATIONS, pluralise
from kvbench.scenes.world import BACKGROUNDS, COLORS, SHAPES

SHAPE_SCALE = 0.04
"""Difference of overlap with two templates that makes the one shape e times as likely as the other."""
COLOR_SCALE = 30.0
"""The same for distances to two colours, summed over channels of 8 bits."""
POSITION_SCALE = 0.1
"""The same, for the odds that a relation holds, of the share of a distance that lies in its direction."""

Answer = Callable[["LoadedDetector"], float]
"""Probability of a right answer to one question."""


@dataclass(frozen=True)
class LoadedDetector:
    """An image as the detector sees it.

    Attributes:
        objects: its connected saturated regions.
        brightness: median over all other pixels of the mean over channels, 0 to 255.
    """

    objects: Sequence[Component]
    brightness: float

    def shape(self, shape: str) -> NDArray[np.float64]:
        """Return the probability [objects] that each object has a shape, one that the detector names."""
        return np.array([_soften(one.overlaps, SHAPE_SCALE, OVERLAP)[shape] for one in self.objects])

    def color(self, color: str) -> NDArray[np.float64]:
        """Return the probability [objects] that each object has a colour."""
        nearness = [{name: -far for name, far in one.distances.items()} for one in self.objects]
        return np.array([_soften(near, COLOR_SCALE)[color] for near in nearness])

    def presence(self, shape: str) -> float:
        """Return the probability that some object has a shape."""
        return float(1 - np.prod(1 - self.shape(shape)))


@dataclass(frozen=True)
class SceneTifa(SoftTifa):
    """`geneval2[scenes]`: Soft-TIFA on captions of the scenes grammar by the programmatic detector.

    Probabilities follow from measured quantities: overlap with the templates of shapes, distance to the named colours,
    share of a distance in a direction, brightness of the background. Values do not compare with other judges'.
    """

    protocol: ClassVar[str] = "scenes"
    part_names: ClassVar[tuple[str, ...]] = (
        *(f"atoms-{number}" for number in range(2, 7)),
        *("object", "count", "attribute", "position"),
    )

    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions about each image, made from its caption."""
        if any("tag" not in images.meta(index) for index in images.indices):
            raise SkipEvaluation("the prompts are not captions of the scenes grammar")
        captions = [str(images.meta(index)["prompt"]) for index in images.indices]
        return [make_questions(caption) for caption in captions]

    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Return the detector; it needs no files and runs on the CPU."""
        return grade, {}


def make_questions(caption: str) -> Questions:
    """Return the questions about a caption; like in GenEval2, `a` is asked for but is no atom.

    Raises:
        ValueError: the caption is not one of the grammar.
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
            raise ValueError(
                f"prompt {caption!r}: names {count} {many}, at most {max(words)} can be asked for"
            )
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
    """Return the probability of the right answer to each question of `make_questions`.

    Args:
        pixels: uint8 [H, W, 3].
        atoms: questions.

    Raises:
        ValueError: a question is none of those.
    """
    plain = pixels[np.ptp(pixels, axis=2) <= SATURATION]
    brightness = float(np.median(plain.mean(-1))) if len(plain) else 0.0
    sight = LoadedDetector(find_components(pixels), brightness)
    return [_answer(sight, atom) for atom in atoms]


def count_probability(chances: Sequence[float], count: int) -> float:
    """Return the probability that exactly `count` of independent events with these chances occur."""
    found = np.array([1.0])
    for chance in chances:
        found = np.convolve(found, (1 - chance, chance))
    return float(found[count]) if count < len(found) else 0.0


def _answer(sight: LoadedDetector, atom: Atom) -> float:
    words = atom.question.removesuffix("?").split()
    singular = {pluralise(shape): shape for shape in SHAPES}
    match words:
        case ["Are", "there", "any", many, *_]:
            return sight.presence(singular[many])
        case ["How", "many", many, *_]:
            number = {"one": 1, **{word: count for count, word in NUMBERS.items()}}[atom.answer]
            return count_probability(sight.shape(singular[many]).tolist(), number)
        case ["Are", "all", many, "in", "the", "image", color] if color in COLORS:
            return _grade_color(sight, singular[many], color)
        case ["Is", "the", "background", name]:
            return _grade_background(sight, name)
        case ["Is", "the", first, *relation, "the", second]:
            return _grade_position(sight, first, " ".join(relation), second)
        case _:
            raise ValueError(f"the detector cannot answer {atom.question!r}")


def _grade_color(sight: LoadedDetector, shape: str, color: str) -> float:
    """Return the expected share of the shape's objects that have the colour, times its presence."""
    chances = sight.shape(shape)
    if not len(chances):
        return 0.0
    return sight.presence(shape) * float(chances @ sight.color(color) / chances.sum())


def _grade_position(sight: LoadedDetector, first: str, relation: str, second: str) -> float:
    """Return the probability of the best pair of objects that both shapes are there and the relation holds."""
    ours, theirs = sight.shape(first), sight.shape(second)
    best = 0.0
    for i, j in permutations(range(len(sight.objects)), 2):
        share = find_direction(sight.objects[i].box, sight.objects[j].box)[relation]
        holds = 1 / (1 + np.exp((LEAST_SHARE - share) / POSITION_SCALE))
        best = max(best, float(ours[i] * theirs[j] * holds))
    return best


def _grade_background(sight: LoadedDetector, name: str) -> float:
    """Return how far the brightness has come from the other background to the named one, from 0 to 1."""
    [other] = [level for key, level in BACKGROUNDS.items() if key != name]
    return float(np.clip((sight.brightness - other) / (BACKGROUNDS[name] - other), 0, 1))


def _soften(values: Mapping[str, float], scale: float, none: float | None = None) -> dict[str, float]:
    """Return the softmax of values over a scale; `none` is the value of a further choice that is left out."""
    numbers = np.array([*values.values(), *([] if none is None else [none])]) / scale
    weights = np.exp(numbers - numbers.max())
    return dict(zip(values, (weights / weights.sum()).tolist(), strict=False))
