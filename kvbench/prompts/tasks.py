"""Retrieval and aggregation like RULER's tasks (arXiv:2404.06654), with other wording, of any length.

`kvbench.prompts.files.RulerFile` reads RULER's own files.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from random import Random
from typing import Annotated

from kvbench.core.config import ConfigError, Range, check_range
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
"""People of chains; no name is a substring of another."""


@dataclass(frozen=True)
class Task(Questions):
    """Base class of questions with several answers; filler extends the prompt to a number of tokens.

    Attributes:
        length: maximum number of tokens of the prompt, including a chat template; one more word would exceed it.
        answer: `written` lets the model generate it, `read` scores the right answer under forced decoding.
    """

    length: Annotated[int, Range(32, MAX_CONTEXT)] = 512
    answer: str = "written"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        """Return a draft with the statements in their order, at random positions of the text."""
        positions = sorted(rng.random() for _ in statements)
        words = tuple(islice(chain.from_iterable(re.findall(r"\S+\s*", text) for text in texts), self.length))
        placed = tuple(zip(positions, statements, strict=True))
        return Hidden(
            self.length, f"{head}\n\n", f"\n\n{question}", answer, self.answer == READ, words, placed
        )


@dataclass(frozen=True)
class Needles(Task):
    """Numbers that the text states for several keys; the question asks for those of some keys.

    Attributes:
        keys: number of keys, such as the access code of the Madrid office.
        values: number of statements for each key, each with another number.
        queries: number of keys that the question asks for.
    """

    keys: Annotated[int, Range(1, len(CITIES) * (1 + len(SUBJECTS)))] = 4
    values: Annotated[int, Range(1, 16)] = 1
    queries: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.queries", self.queries, 1, self.keys)

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a draft that asks for the first `queries` of randomly ordered keys, and their numbers."""
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
    """People with the same ticket as another person, in chains; the question asks for everyone in one chain.

    Attributes:
        chains: number of chains, each with its own ticket.
        hops: number of people of a chain after the first person.
    """

    chains: int = 2
    hops: Annotated[int, Range(1, len(PEOPLE) - 1)] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.chains", self.chains, 1, len(PEOPLE) // (self.hops + 1))

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a question for the first chain, and its people; statements of a chain keep their order in the text."""
        size = self.hops + 1
        people, numbers = rng.sample(PEOPLE, size * self.chains), rng.sample(range(1000, 10000), self.chains)
        turns = [chain for chain in range(self.chains) for _ in range(size)]
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
        outputs = people[:size]
        answer = f" {', '.join(outputs)}."
        return self.hide(rng, texts, statements, head=head, question=question, answer=answer), outputs


@dataclass(frozen=True)
class WordCounts(Task):
    """A list of words of the texts, in which some occur more often than all others; the question asks for these.

    Attributes:
        answers: number of frequent words.
        times: number of occurrences of each frequent word.
        rest: number of occurrences of each other word.
        zipf: exponent of Zipf's law, which the occurrences of all words follow; None for `times` and `rest`.
    """

    answers: Annotated[int, Range(2, 20)] = 3
    times: int = 12
    rest: Annotated[int, Range(1, 1000)] = 1
    zipf: Annotated[float, Range(1, 3)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("prompts.times", self.times, self.rest + 1, 10_000)

    def draft(self, rng: Random, texts: Iterator[str]) -> tuple[Draft, list[str]]:
        """Return a list of words of four to ten letters, and its frequent words, of which none is part of another word.

        Raises:
            ConfigError: the texts have too few different words.
        """
        words = sorted({word for text in islice(texts, 8) for word in re.findall(r"\b[a-z]{4,10}\b", text)})
        rng.shuffle(words)
        head = "This is a list of words. Some of them come more often than all others."
        asked = f"{self.answers} words"
        question = (
            f"Question: Which {asked} of the list come most often?\nAnswer: The most frequent {asked} are"
        )
        frequent: list[str] = []
        while len(frequent) < self.answers and words:
            word = words.pop()
            if word not in question and not any(word in other for other in (*words, *frequent)):
                frequent.append(word)
        if len(frequent) < self.answers or len(words) < 2:
            raise ConfigError(f"prompts.path={self.path}: has too few different words; choose longer texts")
        counted = Counted(
            self.length, f"{head}\n\n", f"\n\n{question}", f" {', '.join(frequent)}.", self.answer == READ,
            tuple(frequent), tuple(words), self.times, self.rest, self.zipf, str(rng.random()),
        )  # fmt: skip
        return counted, frequent
