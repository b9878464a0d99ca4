"""Retrieval in real text: a passkey or planted facts, and a question whose answer is known exactly."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from kvbench.core.config import ConfigError, Range
from kvbench.forced.text import FILL, ForcedText, Part
from kvbench.prompts.base import Prompt, check_choices
from kvbench.prompts.questions import MAX_PIECE, Questions

MIN_CONTEXT, MAX_CONTEXT = 512, 2**20  # tokens
ASKED = ("within", "after")
CHARACTERS_PER_TOKEN = 8
"""Characters of a text that are kept per token; tokens of prose have fewer than six on average."""
CHARACTERS_PER_STATED_TOKEN = 2
"""Lower bound of the mean characters of a token in statements and questions, which contain digits."""
CITIES = (
    "Amsterdam", "Athens", "Berlin", "Boston", "Chicago", "Dublin", "Houston", "London",
    "Madrid", "Moscow", "Paris", "Rome", "Sydney", "Tokyo", "Toronto", "Vienna",
)  # fmt: skip
"""Cities of planted facts: one token each in common vocabularies, so that all questions have equal lengths."""
ASKED_SUBJECT = "access code of the {} office"
"""Subject of the asked fact and of its distractors, completed by a city."""
SUBJECTS = (
    "room number of the {} archive", "phone extension of the {} clinic", "order number of the {} workshop",
    "shelf number of the {} library", "ticket number of the {} museum", "box number of the {} bank",
    "licence number of the {} ferry",
)  # fmt: skip
"""Subjects of the facts that are not asked for."""


@dataclass(frozen=True)
class Retrieval(Questions):
    """Base class of questions whose answers are scored under forced decoding.

    An answer is right if each token is top-1 given the tokens before it. Metadata are the `answer`, the position of its
    statement in % of the context, `depth`, and the tokens of text between statement and question, `gap`.

    Attributes:
        context: number of tokens before the answer, including the question.
        asked: `within` compresses the context with its question, `after` compresses it before the question arrives.
    """

    context: Annotated[int, Range(MIN_CONTEXT, MAX_CONTEXT)] = 1024
    asked: str = "within"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices("asked", self.asked, ASKED)

    def _make_prompt(
        self,
        index: int,
        texts: Iterator[str],
        statements: list[tuple[int, str]],
        question: str,
        **meta: object,
    ) -> Prompt:
        """Return a context of `context` tokens that ends with a question, and its answer, which is scored.

        Args:
            index: index of the prompt.
            texts: a text for each piece of the haystack, of at least `MAX_PIECE` tokens.
            statements: tokens of haystack between each statement and the question, and its text. The haystack before
                the farthest statement fills the rest of the context.
            question: the end of the context, which the answer continues.
            meta: metadata, with the `answer` and the gap of its statement.
        """
        statements = sorted(statements, key=lambda statement: -statement[0])
        left = self.context - statements[0][0] - bound_tokens(question, *(text for _, text in statements))
        parts = _cut_haystack(texts, max(left - MAX_PIECE // 2, 0))
        parts.append(Part(next(texts)[: MAX_PIECE * CHARACTERS_PER_TOKEN], FILL))
        ends = [distance for distance, _ in statements[1:]] + [0]
        for (distance, statement), end in zip(statements, ends, strict=True):
            parts += [Part(statement), *_cut_haystack(texts, distance - end)]
        parts += [Part(question), Part(str(meta["answer"]))]
        cuts = (len(parts) - 2,) if self.asked == "after" else ()
        reading = ForcedText(tuple(parts), None, self.context, cuts, chunked=False)
        return Prompt(index, "".join(part.text for part in parts), meta, reading=reading)


@dataclass(frozen=True)
class Passkey(Retrieval):
    """A number stated twice in a row at a depth of the context, and a question for it at the end.

    The form is of Landmark Attention (Mohtashami and Jaggi, arXiv:2305.16300), in real text in place of repeated
    sentences.

    Attributes:
        depths: positions of the statement in % of the context, cycled over prompts.
        digits: number of digits of the number.
    """

    depths: tuple[int, ...] = (10, 30, 50, 70, 90)
    digits: Annotated[int, Range(4, 20)] = 5  # four digits are two tokens if three are one

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(f"prompts.depths={list(self.depths)}: must be percentages from 0 to 100")

    def _draw(self, index: int, texts: Iterator[str]) -> Prompt:
        rng = self._make_rng(index)
        key = str(rng.randrange(10 ** (self.digits - 1), 10**self.digits))
        statement = f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
        question = "\n\nWhat is the pass key? The pass key is "
        depth = self.depths[index % len(self.depths)]
        haystack = self.context - bound_tokens(statement, question)
        gap = haystack - haystack * depth // 100
        return self._make_prompt(index, texts, [(gap, statement)], question, answer=key, depth=depth, gap=gap)


@dataclass(frozen=True)
class PlantedFacts(Retrieval):
    """Invented facts about offices and libraries, spread over the text; the final question asks for one of them.

    Attributes:
        gaps: tokens of text from the asked fact to the question, cycled over prompts.
        facts: number of facts on different subjects, including the asked fact; all others are spread evenly.
        distractors: number of facts on the asked subject in other cities.
        times: number of statements of the asked fact; `gaps` count from the last statement.
    """

    gaps: tuple[int, ...] = (64, 256, 512, 768)
    facts: Annotated[int, Range(1, 1 + len(SUBJECTS))] = 4
    distractors: Annotated[int, Range(0, len(CITIES) - 1 - len(SUBJECTS))] = 0
    times: Annotated[int, Range(1, 16)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gaps or min(self.gaps) < 0:
            raise ConfigError(f"prompts.gaps={list(self.gaps)}: must be numbers of tokens, at least 0")
        if max(self.gaps) > (most := self._count_haystack()):
            raise ConfigError(
                f"prompts.gaps={list(self.gaps)}: at most {most} in prompts.context={self.context} with these "
                "facts; raise prompts.context, or lower prompts.facts, distractors or times"
            )

    def _draw(self, index: int, texts: Iterator[str]) -> Prompt:
        rng = self._make_rng(index)
        subjects = [*[ASKED_SUBJECT] * (1 + self.distractors), *rng.sample(SUBJECTS, self.facts - 1)]
        cities, numbers = rng.sample(CITIES, len(subjects)), rng.sample(range(1000, 10000), len(subjects))
        asked, *rest = [
            (f"The {subject.format(city)} is ", str(number))
            for subject, city, number in zip(subjects, cities, numbers, strict=True)
        ]
        rng.shuffle(rest)
        gap, haystack = self.gaps[index % len(self.gaps)], self._count_haystack()
        placed = [(haystack * (2 * n + 1) // (2 * len(rest)), fact) for n, fact in enumerate(rest)]
        placed += [(gap + (haystack - gap) * n // self.times, asked) for n in range(self.times)]
        statements = [(distance, f"\n\n{start}{number}.\n\n") for distance, (start, number) in placed]
        depth = 100 * (haystack - gap) // haystack
        return self._make_prompt(
            index, texts, statements, f"\n\n{asked[0]}", answer=asked[1], depth=depth, gap=gap
        )

    def _count_haystack(self) -> int:
        """Return the number of tokens of text that fit beside the longest statements and question."""
        longest = f"\n\nThe {max(SUBJECTS, key=len).format(max(CITIES, key=len))} is 9999.\n\n"
        return self.context - bound_tokens(*[longest] * (self.facts + self.distractors + self.times))


def bound_tokens(*stated: str) -> int:
    """Return an upper bound on the number of tokens of statements and questions, whatever the tokenizer."""
    return sum(len(text) for text in stated) // CHARACTERS_PER_STATED_TOKEN + 1


def _cut_haystack(texts: Iterator[str], tokens: int) -> list[Part]:
    """Return pieces of haystack, `tokens` tokens in total and at most `MAX_PIECE` each, as equal as possible."""
    pieces = -(-tokens // MAX_PIECE)
    counts = [tokens * (piece + 1) // pieces - tokens * piece // pieces for piece in range(pieces)]
    return [Part(next(texts)[: count * CHARACTERS_PER_TOKEN], count) for count in counts]
