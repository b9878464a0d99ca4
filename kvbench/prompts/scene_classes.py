"""Classes of the embedded class-conditional model: one object of every colour and shape."""

from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice

from kvbench.prompts.base import Prompt, check_counts
from kvbench.scenes import grammar


@dataclass(frozen=True)
class SceneClasses:
    """Pairs of a colour and a shape in turn, so that the first prompts of any number cover the classes evenly.

    A prompt is the pair's number among all (`grammar.PAIRS`) and its name; a GenEval line goes with it as metadata.

    Attributes:
        count: number of prompts.
    """

    count: int = 96

    def __post_init__(self) -> None:
        check_counts(count=self.count)

    def load(self) -> list[Prompt]:
        """Return the prompts: number i is of class i modulo the number of classes."""
        return [_make_prompt(index) for index in range(self.count)]

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return `count` prompts, from a class on that the seed chooses.

        Classes are evaluated too, since a model knows no others; the images differ by their noise.
        """
        return [_make_prompt(index, seed) for index in islice(numbers(), count)]


def _make_prompt(index: int, first: int = 0) -> Prompt:
    label = (first + index) % len(grammar.PAIRS)
    line = grammar.describe_class(label)
    return Prompt(index, f"{label} {line['prompt']}", line)
