"""Prompt sets: the embedded scenes grammar, ImageNet's classes, and files."""

import csv
import hashlib
import io
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
    """Prompts of a file: lines of a .txt, or .jsonl or .csv with `prompt` (a line's rest is metadata).

    Attributes:
        path: .txt, .jsonl or .csv.
        count: the first so many, None for all.
        per_prompt: images of every prompt, one after another, numbered by `image_index` in their metadata.
    """

    path: str
    count: int | None = None
    per_prompt: int = 1

    def __post_init__(self) -> None:
        for name in ("count", "per_prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"prompts.{name}={value}: must be at least 1")

    def sibling(self, count: int, seed: int) -> "PromptFile":
        """The first prompts of the same file, for calibration."""
        return replace(self, count=count, per_prompt=1)

    def load(self) -> list[Prompt]:
        """The prompts.

        Raises:
            ConfigError: the file is missing, unreadable or empty, or a line has no prompt.
        """
        path = Path(self.path).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts.path={path}: cannot be read ({error})") from None
        parse = {".jsonl": _json_lines, ".csv": _table}.get(path.suffix, _plain_lines)
        entries = parse(path, text)[: self.count]
        if not entries:
            raise ConfigError(f"prompts.path={path}: holds no prompts")
        repeated = [(entry, image) for entry in entries for image in range(self.per_prompt)]
        return [
            Prompt(index, text, meta if self.per_prompt == 1 else {**meta, "image_index": image})
            for index, ((text, meta), image) in enumerate(repeated)
        ]


def _plain_lines(path: Path, text: str) -> list[tuple[str, dict[str, object]]]:
    return [(line.strip(), {}) for line in text.split("\n") if line.strip()]


def _json_lines(path: Path, text: str) -> list[tuple[str, dict[str, object]]]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
                found.append((str(record["prompt"]), record))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"prompts.path={path}: line {number} is not a JSON object with `prompt`"
                ) from None
    return found


def _table(path: Path, text: str) -> list[tuple[str, dict[str, object]]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    if "prompt" not in (rows.fieldnames or ()):
        raise ConfigError(f"prompts.path={path}: its first line names no column `prompt`")
    found: list[tuple[str, dict[str, object]]] = []
    for row in rows:
        if None in row or not (row["prompt"] or "").strip():
            raise ConfigError(f"prompts.path={path}: line {rows.line_num} has no prompt, or too many columns")
        found.append((row["prompt"].strip(), dict(row)))
    return found


def digest(prompts: list[Prompt]) -> str:
    """SHA-256 of the texts in order."""
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()
