"""Retrieval and aggregation like RULER's tasks (arXiv:2404.06654), in different words: any length, exact answers.

RULER's own files are read by `kvbench.prompts.ruler`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from random import Random

from kvbench.core.config import ConfigError, check_range
from kvbench.prompts.base import Prompt, check_choices
from kvbench.prompts.draft import Counted, Draft, Hidden
from kvbench.prompts.questions import Questions
from kvbench.prompts.retrieval import ASKED_SUBJECT, CITIES, MAX_CONTEXT, SUBJECTS

READ = "read"
ANSWERS = ("written", READ)
PEOPLE = (
    "Ada", "Alma", "Anton", "Bella", "Boris", "Carla", "Carlos", "Clara", "David", "Diana", "Edgar", "Elena",
    "Emil", "Erika", "Felix", "Flora", "Frank", "Gloria", "Greta", "Hanna", "Hector", "Helen", "Igor", "Irene",
    "Jacob", "Julia", "Kate", "Klaus", "Laura", "Leon", "Linda", "Lucas", "Marco", "Maria", "Martin", "Nadia",
    "Nora", "Oliver", "Oscar", "Paula", "Peter", "Robert", "Rosa", "Sarah", "Simon", "Tessa", "Victor", "Wanda",
)  # fmt: skip
"""People of chains; no name is part of another."""


@dataclass(frozen=True)
class Task(Questions):
    """Base of questions with several answers; the text around fills the prompt up to a number of tokens.

    Attributes:
        length: tokens of the prompt, in the chat template if there is one; a word of the text may not fit any more.
        answer: `written`: the model writes it; `read`: it reads the right one, for divergence from the full cache.
    """

    length: int = 512
    answer: str = "written"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.length", self.length, 32, MAX_CONTEXT)
        check_choices("answer", self.answer, ANSWERS)

    def _draw(self, index: int, texts: Iterator[str]) -> Prompt:
        draft, outputs = self.draft(self._make_rng(index), texts)
        return Prompt(index, draft.write(0), {"outputs": outputs}, draft=draft)

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a question with its statements, and all correct outputs."""
        raise NotImplementedError

    def hide(
        self,
        rng: Random,
        texts: Iterator[str],
        statements: Sequence[str],
        *,
        head: str,
        question: str,
        answer: str,
    ) -> Hidden:
        """Return statements in their order, at random places of the text."""
        places = sorted(rng.random() for _ in statements)
        words = tuple(islice(chain.from_iterable(re.findall(r"\S+\s*", text) for text in texts), self.length))
        placed = tuple(zip(places, statements, strict=True))
        return Hidden(
            self.length, f"{head}\n\n", f"\n\n{question}", answer, self.answer == READ, words, placed
        )


@dataclass(frozen=True)
class Needles(Task):
    """Numbers that the text states of several keys; the question is about some of them.

    Attributes:
        keys: number of keys, such as the access code of the Madrid office.
        values: numbers that are stated of each key, one by one.
        queries: keys that the question is about.
    """

    keys: int = 4
    values: int = 1
    queries: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.keys", self.keys, 1, len(CITIES) * (1 + len(SUBJECTS)))
        check_range("prompts.values", self.values, 1, 16)
        check_range("prompts.queries", self.queries, 1, self.keys)

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a question about the first keys of a random order."""
        pairs = rng.sample([*product((ASKED_SUBJECT, *SUBJECTS), CITIES)], self.keys)
        keys = [subject.format(city) for subject, city in pairs]
        numbers = [str(number) for number in rng.sample(range(1000, 10000), self.keys * self.values)]
        stated = {key: numbers[n * self.values : (n + 1) * self.values] for n, key in enumerate(keys)}
        start, lead = ("The", "The {} is") if self.values == 1 else ("One", "The numbers stated as {} are")
        statements = [f"{start} {key} is {number}." for key, several in stated.items() for number in several]
        rng.shuffle(statements)
        asked = keys[: self.queries]
        answers = [f"{lead.format(key)} {', '.join(stated[key])}." for key in asked]
        first, answer = lead.format(asked[0]), " ".join(answers)
        named = " and ".join(f"the {key}" for key in asked)
        question = f"Question: What is stated as {named}?\nAnswer: {first}"
        head = "This text states several numbers. Remember them: a question about them follows it."
        hidden = self.hide(
            rng, texts, statements, head=head, question=question, answer=answer.removeprefix(first)
        )
        return hidden, [number for key in asked for number in stated[key]]


@dataclass(frozen=True)
class Chains(Task):
    """People who have the same number as another one, in chains; the question is about everyone in one chain.

    Attributes:
        chains: number of chains, each with a number of its own.
        hops: people of a chain after the first one.
    """

    chains: int = 2
    hops: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.hops", self.hops, 1, len(PEOPLE) - 1)
        check_range("prompts.chains", self.chains, 1, len(PEOPLE) // (self.hops + 1))

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a question about the first chain; statements of a chain keep their order among those of others."""
        size = self.hops + 1
        people, numbers = rng.sample(PEOPLE, size * self.chains), rng.sample(range(1000, 10000), self.chains)
        turns = [number for number in range(self.chains) for _ in range(size)]
        rng.shuffle(turns)
        queues = [iter(people[n * size : (n + 1) * size]) for n in range(self.chains)]
        last: dict[int, str] = {}
        statements = []
        for turn in turns:
            person = next(queues[turn])
            same = f"the same ticket as {last[turn]}" if turn in last else f"ticket {numbers[turn]}"
            statements.append(f"{person} has {same}.")
            last[turn] = person
        head = "This text states who has which ticket. Remember it: a question about them follows."
        ticket = f"ticket {numbers[0]}"
        question = f"Question: Which {size} people have {ticket}?\nAnswer: The people with {ticket} are"
        found = people[:size]
        return self.hide(
            rng, texts, statements, head=head, question=question, answer=f" {', '.join(found)}."
        ), found


@dataclass(frozen=True)
class WordCounts(Task):
    """A list of words of the texts, in which some occur more often than all others; the question is about them.

    Attributes:
        answers: number of the frequent words.
        times: how often each of them comes.
        rest: how often each other word comes.
        zipf: exponent of Zipf's law, by which the numbers of words fall in place of `times` and `rest`.
    """

    answers: int = 3
    times: int = 12
    rest: int = 1
    zipf: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.answers", self.answers, 2, 20)
        check_range("prompts.rest", self.rest, 1, 1000)
        check_range("prompts.times", self.times, self.rest + 1, 10_000)
        if self.zipf is not None and not 1 <= self.zipf <= 3:
            raise ConfigError(f"prompts.zipf={self.zipf}: must be from 1 to 3, or null")

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a list of words of four to ten letters; no answer is part of another word."""
        words = sorted({word for text in islice(texts, 8) for word in re.findall(r"\b[a-z]{4,10}\b", text)})
        rng.shuffle(words)
        head = "This is a list of words. Some of them come more often than all others."
        asked = f"{self.answers} words"
        question = (
            f"Question: Which {asked} of the list come most often?\nAnswer: The most frequent {asked} are"
        )
        found: list[str] = []
        while len(found) < self.answers and words:
            word = words.pop()
            if word not in question and not any(word in other for other in (*words, *found)):
                found.append(word)
        if len(found) < self.answers or len(words) < 2:
            raise ConfigError(f"prompts.path={self.path}: has too few different words; choose longer texts")
        counted = Counted(
            self.length, f"{head}\n\n", f"\n\n{question}", f" {', '.join(found)}.", self.answer == READ,
            tuple(found), tuple(words), self.times, self.rest, self.zipf, str(rng.random()),
        )  # fmt: skip
        return counted, found
