"""Captions and classes of the embedded scenes grammar."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.prompts.base import Count, Prompt, Seed, check_total, leave_out, make_prompts
from kvbench.scenes import grammar

CANDIDATES_PER_PROMPT = 64
"""Number of candidates per calibration prompt, because many of them may be evaluated."""


@dataclass(frozen=True)
class Scenes:
    """Captions of the scenes grammar, GenEval's six tasks in turn.

    Attributes:
        count: number of prompts.
        seed: seed of the set.
        held_out: only prompts with a colour-shape pair outside the training data.
        relations: spatial relations of position prompts.
        per_prompt: consecutive images of every prompt, numbered by `image_index` in their metadata.
    """

    in_random_order: ClassVar[bool] = True

    count: Count = 96
    seed: Seed = 0
    held_out: bool = False
    relations: tuple[str, ...] = grammar.RELATIONS
    per_prompt: Count = 1

    def __post_init__(self) -> None:
        check_total(self.count * self.per_prompt, "per_prompt", self.per_prompt)
        unknown = [relation for relation in self.relations if relation not in grammar.RELATIONS]
        if unknown or not self.relations:
            given, known = list(self.relations), ", ".join(grammar.RELATIONS)
            raise ConfigError(f"prompts.relations={given}: choose from {known}")

    def load(self) -> list[Prompt]:
        """Return the captions as prompts."""
        lines = grammar.evaluation_prompts(
            self.count, self.seed, held_out=self.held_out, relations=self.relations
        )
        return make_prompts(((str(line["prompt"]), line) for line in lines), self.per_prompt)

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` prompts of another seed that are not evaluated."""
        more = replace(self, count=CANDIDATES_PER_PROMPT * count, seed=self.seed + seed, per_prompt=1)
        return leave_out(more.load(), self.load(), count)


@dataclass(frozen=True)
class SceneClasses:
    """Pairs of a colour and a shape in turn, so that any number of prompts covers the classes evenly.

    A prompt is the index in `grammar.PAIRS` and the pair's name; its metadata is a GenEval line.

    Attributes:
        count: number of prompts.
    """

    count: Count = 96

    def load(self) -> list[Prompt]:
        """Return the prompts: prompt i has class i modulo the class count."""
        return [_make_prompt(index) for index in range(self.count)]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return `count` prompts, starting at class `seed`.

        The classes are evaluated too, because a model has no other classes; images differ by their noise.
        """
        return [_make_prompt(index, seed) for index in range(count)]


def _make_prompt(index: int, first: int = 0) -> Prompt:
    label = (first + index) % len(grammar.PAIRS)
    line = grammar.describe_class(label)
    return Prompt(index, f"{label} {line['prompt']}", line)
