"""Classes of the embedded class-conditional model: one object of every colour and shape."""

from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice

from kvbench.prompts.base import Prompt, check_counts
from kvbench.scenes import grammar


@dataclass(frozen=True)
class SceneClasses:
    """Pairs of a colour and a shape in turn, so that any number of prompts covers the classes evenly.

    A prompt is the index in `grammar.PAIRS` and the pair's name; its metadata is a GenEval line.

    Attributes:
        count: number of prompts.
    """

    count: int = 96

    def __post_init__(self) -> None:
        check_counts(count=self.count)

    def load(self) -> list[Prompt]:
        """Return the prompts: number i has class i modulo the number of classes."""
        return [_make_prompt(index) for index in range(self.count)]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return `count` prompts, starting at class `seed`.

        The classes are evaluated too, since a model has no others; images differ by their noise.
        """
        return [_make_prompt(index, seed) for index in islice(numbers(), count)]


def _make_prompt(index: int, first: int = 0) -> Prompt:
    label = (first + index) % len(grammar.PAIRS)
    line = grammar.describe_class(label)
    return Prompt(index, f"{label} {line['prompt']}", line)
