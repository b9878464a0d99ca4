"""Prompt sets: the embedded scenes grammar, ImageNet's classes, and files."""

import hashlib
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvbench.config import ConfigError
from kvbench.scenes import grammar

IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the set, its text, and what evaluators may want to know (such as a GenEval line)."""

    index: int
    text: str
    meta: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenes:
    """Captions of the scenes grammar, GenEval's six tasks in turn.

    Attributes:
        count: prompts.
        seed: seed of the set.
        held_out: only prompts with a colour-shape pair that training never showed.
        relations: spatial relations that position prompts use.
    """

    count: int = 96
    seed: int = 0
    held_out: bool = False
    relations: tuple[str, ...] = grammar.RELATIONS

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"prompts.count={self.count}: must be at least 1")
        unknown = [relation for relation in self.relations if relation not in grammar.RELATIONS]
        if unknown or not self.relations:
            raise ConfigError(f"prompts.relations: choose from {', '.join(grammar.RELATIONS)}")

    def load(self) -> list[Prompt]:
        """The prompts."""
        lines = grammar.evaluation_prompts(
            self.count, self.seed, held_out=self.held_out, relations=self.relations
        )
        return [Prompt(index, str(line["prompt"]), line) for index, line in enumerate(lines)]

    def sibling(self, count: int, seed: int) -> "Scenes":
        """Other prompts of the same kind, for calibration."""
        return replace(self, count=count, seed=self.seed + seed)


@dataclass(frozen=True)
class ImageNet:
    """Class numbers of ImageNet in turn, so that the first prompts of any number cover the classes evenly.

    A prompt is the number alone; the class's name goes with it as metadata where torchvision is installed.

    Attributes:
        classes: numbers from 0 to 999, None for all of them.
        per_class: prompts of every class.
        count: the first so many, None for all.
    """

    classes: tuple[int, ...] | None = None
    per_class: int = 50
    count: int | None = None

    def __post_init__(self) -> None:
        for name in ("per_class", "count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"prompts.{name}={value}: must be at least 1")
        if self.classes is not None and not self.classes:
            raise ConfigError("prompts.classes=[]: name at least one class, or null for all")
        outside = [number for number in self._classes if not 0 <= number < IMAGENET_CLASSES]
        if outside:
            raise ConfigError(
                f"prompts.classes: {outside[0]} is not a number from 0 to {IMAGENET_CLASSES - 1}"
            )

    @property
    def _classes(self) -> tuple[int, ...]:
        return tuple(range(IMAGENET_CLASSES)) if self.classes is None else tuple(self.classes)

    def load(self) -> list[Prompt]:
        """The prompts: number i is of class i modulo the number of classes."""
        names = imagenet_names()
        numbers = (self._classes * self.per_class)[: self.count]
        return [
            Prompt(index, str(number), {"class": number} | ({"name": names[number]} if names else {}))
            for index, number in enumerate(numbers)
        ]

    def sibling(self, count: int, seed: int) -> "ImageNet":
        """One prompt each of `count` classes drawn from these (of every class several, if there are fewer)."""
        classes = random.Random(seed).sample(self._classes, min(count, len(self._classes)))
        return ImageNet(tuple(classes), -(-count // len(classes)), count)


def imagenet_names() -> list[str]:
    """Names of the 1000 classes as torchvision's weights list them, empty without torchvision."""
    try:
        from torchvision.models import AlexNet_Weights
    except (ImportError, RuntimeError):  # not installed, or built for another torch: names are a courtesy
        return []
    return list(AlexNet_Weights.IMAGENET1K_V1.meta["categories"])


@dataclass(frozen=True)
class PromptFile:
    """Prompts of a file: one per line of a text file, or JSON lines with `prompt` (a line's rest is metadata).

    Attributes:
        path: .txt or .jsonl.
        count: the first so many, None for all.
    """

    path: str
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"prompts.count={self.count}: must be at least 1")

    def sibling(self, count: int, seed: int) -> "PromptFile":
        """The first prompts of the same file, for calibration."""
        return replace(self, count=count)

    def load(self) -> list[Prompt]:
        """The prompts.

        Raises:
            ConfigError: the file is missing, unreadable or empty, or a line has no prompt.
        """
        path = Path(self.path).expanduser()
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts.path={path}: cannot be read ({error})") from None
        if not lines:
            raise ConfigError(f"prompts.path={path}: holds no prompts")
        return [_prompt(path, index, line) for index, line in enumerate(lines[: self.count])]


def _prompt(path: Path, index: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(index, line.strip())
    try:
        record = json.loads(line)
        return Prompt(index, str(record["prompt"]), record)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"prompts.path={path}: line {index + 1} is not a JSON object with `prompt`"
        ) from None


def digest(prompts: list[Prompt]) -> str:
    """SHA-256 of the texts in order."""
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()
