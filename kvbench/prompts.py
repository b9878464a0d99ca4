"""Prompt sets: the embedded scenes grammar, and files."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvbench.config import ConfigError
from kvbench.scenes import grammar


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
