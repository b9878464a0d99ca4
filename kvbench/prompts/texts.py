"""Texts that are scored under a method: prose, code and chats that ship, or the user's own."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from kvbench.core.config import ConfigError, Range
from kvbench.forced.text import ForcedText, Part
from kvbench.prompts.base import Count, Prompt, Seed, check_choices, choose_numbers
from kvbench.prompts.text_files import DOMAINS, TextEntry, read_shipped, read_texts

MAX_LENGTH = 2**20
"""Maximum number of tokens of a text."""


@dataclass(frozen=True)
class Texts:
    """Texts that a run scores token by token (forced decoding), all cut to one length.

    Attributes:
        domain: domain of the texts that ship, one of `DOMAINS`.
        calibration: domain of calibration texts; None for `domain`, or for the rest of the user's texts.
        count: number of texts, spread evenly over the set; None takes all.
        length: number of tokens of each text.
        given: number of tokens before the first scored token.
        path: own texts that replace the domain's: a .jsonl with a `text` in each line, a .txt, which is one text, or a
            folder of .txt files; None for the domain's.
        draw: seed of a random choice of `count` texts; None spreads them evenly.
    """

    domain: str = "manuals"
    calibration: str | None = None
    count: Count | None = 8
    length: Annotated[int, Range(3, MAX_LENGTH)] = 772
    given: int = 516
    path: str | None = None
    draw: Seed | None = None

    def __post_init__(self) -> None:
        check_choices("domain", self.domain, DOMAINS)
        if self.calibration is not None:
            check_choices("calibration", self.calibration, DOMAINS)
        if not 1 <= self.given <= self.length - 2:
            raise ConfigError(
                f"prompts.given={self.given}: must be at least 1, and at least 2 less than prompts.length={self.length}"
            )

    def load(self) -> list[Prompt]:
        """Return the texts to evaluate; `text_index` in their metadata is the index in the set.

        Raises:
            ConfigError: the file is missing or damaged, has too few texts, or one of fewer characters than `length`.
        """
        entries = read_texts(self.domain, self.path, "evaluation")
        return self._make_prompts(entries, choose_numbers(len(entries), self.count, self.draw))

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` calibration texts, chosen by `seed`, that are not evaluated."""
        if self.path is None or self.calibration is not None:
            entries = read_shipped(self.calibration or self.domain, "calibration")
            free = list(range(len(entries)))
        else:
            entries = read_texts(self.domain, self.path, "evaluation")
            evaluated = {entries[number][0] for number in choose_numbers(len(entries), self.count, self.draw)}
            free = [number for number, (text, _) in enumerate(entries) if text not in evaluated]
        return self._make_prompts(entries, sorted(random.Random(seed).sample(free, min(count, len(free)))))

    def _make_prompts(self, entries: Sequence[TextEntry], numbers: Sequence[int]) -> list[Prompt]:
        prompts = []
        for index, number in enumerate(numbers):
            text, meta = entries[number]
            if len(text) < self.length:
                raise ConfigError(
                    f"prompts.length={self.length}: text {number + 1} has only {len(text)} characters; lower "
                    "prompts.length, or choose longer texts"
                )
            reading = ForcedText((Part(text, self.length),), self.given)
            origin = f"prompts.path={self.path}: text {number + 1}" if self.path else ""
            prompts.append(Prompt(index, text, {**meta, "text_index": number}, origin, reading))
        return prompts
