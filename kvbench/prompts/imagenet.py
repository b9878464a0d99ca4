"""Class numbers of ImageNet as prompts."""

import itertools
import random
import sys
from dataclasses import dataclass
from typing import Annotated

from kvbench.core.config import ConfigError, Range
from kvbench.prompts.base import Count, Prompt, check_total

IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class ImageNet:
    """Class numbers of ImageNet in turn, so that any number of prompts covers the classes evenly.

    A prompt is the number alone; its metadata has the class's name if torchvision is installed.

    Attributes:
        classes: class numbers from 0 to 999; None takes all.
        per_class: number of prompts of every class.
        count: maximum number of prompts; None takes all.
    """

    classes: tuple[Annotated[int, Range(0, IMAGENET_CLASSES - 1)], ...] | None = None
    per_class: Count = 50
    count: Count | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and not self.classes:
            raise ConfigError("prompts.classes=[]: name at least one class, or null for all")

    @property
    def _classes(self) -> tuple[int, ...]:
        return tuple(range(IMAGENET_CLASSES)) if self.classes is None else tuple(self.classes)

    def load(self) -> list[Prompt]:
        """Return the prompts: prompt i has class i modulo the class count."""
        classes = self._classes
        total = min(len(classes) * self.per_class, self.count or sys.maxsize)
        check_total(total, "per_class", self.per_class)
        names = read_class_names()
        numbers = itertools.islice(itertools.cycle(classes), total)
        return [
            Prompt(index, str(number), {"class": number} | ({"name": names[number]} if names else {}))
            for index, number in enumerate(numbers)
        ]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return `count` prompts of random classes, one per class unless there are fewer classes.

        The classes are evaluated too, because a model has no other classes; images differ by their noise.
        """
        classes = random.Random(seed).sample(self._classes, min(count, len(self._classes)))
        return ImageNet(tuple(classes), -(-count // len(classes)), count).load()


def read_class_names() -> list[str]:
    """Return the names of the 1000 classes from torchvision; empty if torchvision is not installed."""
    try:
        from torchvision.models import AlexNet_Weights
    except (ImportError, RuntimeError):  # not installed, or built for another torch
        return []
    return list(AlexNet_Weights.IMAGENET1K_V1.meta["categories"])
