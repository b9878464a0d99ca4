"""Exactness: an image has exactly the objects of its caption, at any position.

This is stricter than GenEval, which judges one aspect per task and mostly allows extra objects. Only the relation of
position prompts is ignored.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.files.images import ImageSet
from kvbench.eval.geneval.rules import Instance
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.scores import MetricSpec, share_score
from kvbench.scenes.detector import detect
from kvbench.scenes.grammar import NUMBERS, Pair
from kvbench.scenes.world import COLORS, SHAPES


def count_named(caption: str) -> Counter[Pair]:
    """Count the objects of each (colour, shape) that a caption names.

    Raises:
        ValueError: the caption names no object, or a colour is not between a number and a shape.
    """
    numbers = {"a": 1, **{word: count for count, word in NUMBERS.items()}}
    shapes = {form: shape for shape in SHAPES for form in (shape, shape + "s", shape + "es")}
    words = caption.lower().split()
    objects: Counter[Pair] = Counter()
    for i, word in enumerate(words):
        if word not in COLORS:
            continue
        number, shape = " ".join(words[i - 1 : i]), " ".join(words[i + 1 : i + 2])
        if number not in numbers or shape not in shapes:
            raise ValueError(f"prompt {caption!r}: {word!r} must be between a number or 'a' and a shape")
        objects[word, shapes[shape]] += numbers[number]
    if not objects:
        raise ValueError(f"prompt {caption!r}: names no object such as 'a red ring'")
    return objects


def exact(shapes: Iterable[Instance], caption: str) -> bool:
    """Return whether the objects from `detect` match a caption: none missing, none extra, all colours correct."""
    return Counter((item.color, item.label) for item in shapes) == count_named(caption)


def read_captions(images: ImageSet) -> list[str]:
    """Return the caption of each image; raise SkipEvaluation if prompts are not of the grammar."""
    if any("tag" not in images.meta(index) for index in images.indices):
        raise SkipEvaluation("the prompts are not captions of the scenes grammar")
    return [str(images.meta(index)["prompt"]) for index in images.indices]


@dataclass(frozen=True)
class Exact(Evaluator):
    """`exact[scenes]`: share of images with exactly the objects of their prompt."""

    name: ClassVar[str] = "exact"
    protocol: ClassVar[str] = "scenes"
    meta_keys: ClassVar[tuple[str, ...]] = ("tag", "prompt")
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3)

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Judge every image; reference and device are not used."""
        pairs = zip(images.batches(1, self.name), read_captions(images), strict=True)
        verdicts = [exact(detect(images.image(index)), caption) for [index], caption in pairs]
        scores = {self.metric: share_score([float(verdict) for verdict in verdicts], images.clusters)}
        return make_result(self, scores, {"index": images.indices, self.metric: verdicts})
