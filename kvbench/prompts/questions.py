"""Base of questions on statements in real text, whose answers are known exactly."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import ClassVar

from kvbench.core.config import ConfigError
from kvbench.prompts.base import Count, Prompt, Seed, check_choices
from kvbench.prompts.text_files import DOMAINS, read_texts

MAX_PIECE = 2048
"""Maximum number of consecutive tokens of a text; the texts that ship have at least 2300 of SmolLM2's."""


@dataclass(frozen=True)
class Questions:
    """Base class of questions on random statements, which are inserted into real text.

    Attributes:
        count: number of questions.
        seed: seed of the set.
        domain: domain of the text around the statements.
        path: own texts that replace the domain's, see `kvbench.prompts.texts.Texts`; None for the domain's.
    """

    in_random_order: ClassVar[bool] = True

    count: Count = 20
    seed: Seed = 0
    domain: str = "manuals"
    path: str | None = None

    def __post_init__(self) -> None:
        check_choices("domain", self.domain, DOMAINS)

    def load(self) -> list[Prompt]:
        """Return the questions, with their answers as metadata."""
        return self._draw_all("evaluation")

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return `count` questions of another seed, in calibration texts of the domain unless `path` is set."""
        return replace(self, count=count, seed=self.seed + seed + 1)._draw_all("calibration")

    def _draw_all(self, part: str) -> list[Prompt]:
        texts = tuple(text for text, _ in read_texts(self.domain, self.path, part))
        if short := [number for number, text in enumerate(texts, 1) if len(text) < MAX_PIECE]:
            raise ConfigError(
                f"prompts.path={self.path}: text {short[0]} has only {len(texts[short[0] - 1])} characters; choose "
                f"texts of at least {MAX_PIECE} tokens"
            )
        return [self._draw(index, self._shuffle(texts, index)) for index in range(self.count)]

    def _draw(self, index: int, texts: Iterator[str]) -> Prompt:
        """Return a question; `texts` yields a text for every piece of filler."""
        raise NotImplementedError

    def _make_rng(self, index: int) -> random.Random:
        return random.Random(f"{type(self).__name__} {self.seed} {index}")

    def _shuffle(self, texts: tuple[str, ...], index: int) -> Iterator[str]:
        """Yield the texts in random order, repeated without end."""
        return cycle(random.Random(f"hay {self.seed} {index}").sample(texts, len(texts)))
