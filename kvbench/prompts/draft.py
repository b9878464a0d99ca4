"""Prompts with any amount of filler, which is fitted to the tokens of the model."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise, takewhile
from random import Random

from kvbench.core.config import ConfigError


@dataclass(frozen=True)
class Draft:
    """A prompt whose filler is not yet fitted to a number of tokens.

    Attributes:
        length: maximum number of tokens of the prompt.
        head: text before the filler.
        question: text after the filler, up to the beginning of the answer.
        answer: the right answer, which continues the prompt.
        read: whether the answer is scored under forced decoding; otherwise the model generates an answer.
    """

    length: int
    head: str
    question: str
    answer: str
    read: bool

    def write(self, size: int) -> str:
        """Return the prompt with `size` units of filler more than its minimum; a unit has at least one token."""
        return f"{self.head}{self.fill(size)}{self.question}"

    def fill(self, size: int) -> str:
        """Return the text between head and question."""
        raise NotImplementedError

    def fit(self, count_tokens: Callable[[str], int]) -> str:
        """Return the longest prompt of at most `length` tokens; raise ConfigError if the shortest has more."""
        sizes = range(self.length + 1)
        fitting = bisect_right(sizes, self.length, key=lambda size: count_tokens(self.write(size)))
        if not fitting:
            least = count_tokens(self.write(0))
            raise ConfigError(
                f"prompts.length={self.length}: a question with its statements and no text around them has {least} "
                "tokens; raise prompts.length, or ask for less"
            )
        return self.write(fitting - 1)


@dataclass(frozen=True)
class Hidden(Draft):
    """Statements in real text, whose words are the units of filler.

    Attributes:
        words: at least `length` words of the text, each with the space after it.
        statements: position of each statement as a share of the words, in ascending order, and its text.
    """

    words: tuple[str, ...]
    statements: tuple[tuple[float, str], ...]

    def fill(self, size: int) -> str:
        """Return `size` words with the statements between them, each a paragraph."""
        parts, ends = [], [int(share * size) for share, _ in self.statements]
        for (_, statement), (start, end) in zip(self.statements, pairwise([0, *ends]), strict=True):
            parts.append(f"{''.join(self.words[start:end]).rstrip()}\n\n{statement}\n\n")
        return "".join(parts) + "".join(self.words[max(ends) : size]).rstrip()


@dataclass(frozen=True)
class Counted(Draft):
    """A list of words in random order, in which some occur more often than all others.

    Attributes:
        frequent: the words that occur most often, in descending order of frequency.
        others: filler words; if the list needs more, pairs of them are used.
        times: occurrences of each frequent word if `zipf` is None.
        rest: occurrences of each filler word if `zipf` is None.
        zipf: exponent of Zipf's law, which the occurrences of all words follow; None for `times` and `rest`.
        seed: seed of the order.
    """

    frequent: tuple[str, ...]
    others: tuple[str, ...]
    times: int
    rest: int
    zipf: float | None
    seed: str

    def fill(self, size: int) -> str:
        """Return the list with `size` filler words or, with `zipf`, `size` more occurrences of the first word."""
        frequent = len(self.frequent)
        counts = [self.times] * frequent + [self.rest] * size if self.zipf is None else self._fall(size)
        words = [*self.frequent, *(self.name_other(rank) for rank in range(len(counts) - frequent))]
        listed = [word for word, times in zip(words, counts, strict=False) for _ in range(times)]
        Random(self.seed).shuffle(listed)
        return f"{', '.join(listed)}."

    def name_other(self, rank: int) -> str:
        """Return the filler word of rank `rank`, from 0."""
        pair, rank = divmod(rank, len(self.others))
        word = self.others[rank]
        return word if not pair else f"{word}-{self.others[(rank + pair) % len(self.others)]}"

    def _fall(self, size: int) -> list[int]:
        """Return the Zipf counts of all words by rank if rank 1 occurs `size` times more than the minimum."""
        counts = (self._count(self._least + size, rank) for rank in count(1))
        return list(takewhile(bool, counts))

    def _count(self, most: int, rank: int) -> int:
        """Return the Zipf count of the word of rank `rank` (from 1) if rank 1 occurs `most` times."""
        assert self.zipf is not None
        return int(most / rank**self.zipf)

    @cached_property
    def _least(self) -> int:
        """Smallest count of rank 1 at which all frequent words and the next word have distinct counts."""
        ranks = range(1, len(self.frequent) + 2)
        return next(
            most for most in count(1) if len({self._count(most, rank) for rank in ranks}) == len(ranks)
        )
