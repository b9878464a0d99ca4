"""Prompts, the interface of their sources, and checks of their settings."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from typing import Annotated, Protocol

from kvbench.core.config import MAX_PROMPTS, MAX_SEED, ConfigError, Range, show
from kvbench.core.files import hash_content
from kvbench.forced.text import ForcedText, Part
from kvbench.prompts.draft import Draft

Count = Annotated[int, Range(1, MAX_PROMPTS)]  # number of prompts
Seed = Annotated[int, Range(0, MAX_SEED)]  # seed of the choice of prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: index among the prompts of a run.
        text: the model's input.
        meta: metadata for evaluators, such as a GenEval line; JSON values.
        origin: key, file and line of the prompt's source, for messages; empty without a file.
        reading: text for forced decoding; None if the model generates from `text`.
        draft: text that is fitted to the model's tokens and replaces `text`; None if `text` is final.
    """

    index: int
    text: str
    meta: dict[str, object] = field(default_factory=dict)
    origin: str = ""
    reading: ForcedText | None = None
    draft: Draft | None = None


class PromptSource(Protocol):
    """Source of a run's prompts.

    A class whose prompts come in random order, so that neighbours are not more alike than other prompts, has the
    attribute `in_random_order`.
    """

    def load(self) -> list[Prompt]:
        """Return the prompts to evaluate."""
        ...

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` calibration prompts chosen by `seed`, if possible none that `load` returns."""
        ...


def leave_out(candidates: Iterable[Prompt], evaluated: Iterable[Prompt], count: int) -> list[Prompt]:
    """Return the first `count` candidates whose texts are not evaluated, with new indices from 0."""
    known = {prompt.text for prompt in evaluated}
    others = (prompt for prompt in candidates if prompt.text not in known)
    return [replace(prompt, index=index) for index, prompt in enumerate(islice(others, count))]


def choose_numbers(total: int, count: int | None, draw: int | None) -> list[int]:
    """Return indices of `count` of `total` entries (None: all), spread evenly or, with a seed `draw`, chosen at random.

    Raises:
        ConfigError: there are fewer entries than `count`.
    """
    if count is not None and count > total:
        raise ConfigError(f"prompts.count={count}: the set has {total} prompts; prompts.count=null takes all")
    count = total if count is None else count
    if draw is not None:
        return sorted(random.Random(draw).sample(range(total), count))
    return [row * total // count for row in range(count)]


def repeat(entries: Iterable[tuple[str, dict[str, object]]], times: int) -> list[Prompt]:
    """Return each text with its metadata `times` times in a row, with `image_index` in the metadata."""
    repeated = ((text, {**meta, "image_index": image}) for text, meta in entries for image in range(times))
    return [Prompt(index, text, meta) for index, (text, meta) in enumerate(repeated)]


def make_prompts(entries: Iterable[tuple[str, dict[str, object]]], times: int) -> list[Prompt]:
    """Return each text with its metadata, by `repeat` if `times` is more than 1."""
    if times > 1:
        return repeat(entries, times)
    return [Prompt(index, text, meta) for index, (text, meta) in enumerate(entries)]


def load_ordered(source: PromptSource, seed: int | None) -> list[Prompt]:
    """Return the prompts of a source, in random order unless `seed` is None; neighbours of one text stay together."""
    prompts = source.load()
    if seed is None:
        return prompts
    groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: prompt.text)]
    random.Random(seed).shuffle(groups)
    return [replace(prompt, index=index) for index, prompt in enumerate(chain.from_iterable(groups))]


def fit(prompt: Prompt, count_tokens: Callable[[str, bool], int]) -> Prompt:
    """Return a prompt with its draft fitted to the tokens of a model; a prompt without a draft is unchanged.

    Args:
        prompt: the prompt.
        count_tokens: function from a text, and whether it is scored instead of answered, to its number of tokens.

    Raises:
        ConfigError: the draft's `length` is too small.
    """
    draft = prompt.draft
    if draft is None:
        return prompt
    read = draft.read and prompt.reading is None  # with a `reading`, the model's own output is scored instead
    text = draft.fit(lambda text: count_tokens(text, read))
    if not read:
        return replace(prompt, text=text, draft=None)
    reading = ForcedText((Part(text), Part(draft.answer)), chunked=False)
    return replace(prompt, text=text + draft.answer, reading=reading, draft=None)


def hash_prompts(prompts: list[Prompt]) -> str:
    """Return the SHA-256 of the texts of prompts in order."""
    return hash_content("\0".join(prompt.text for prompt in prompts))


def check_choices(name: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Check that `chosen` is one of `known`, or a list of at least one; a ConfigError names the key `prompts.NAME`."""
    parts = {chosen} if isinstance(chosen, str) else {*chosen}
    if not parts or not parts <= {*known}:
        given = show(chosen) if isinstance(chosen, str) else list(chosen)
        raise ConfigError(f"prompts.{name}={given}: choose from {', '.join(known)}")


def check_total(total: int, name: str, each: int) -> None:
    """Raise a ConfigError that names the key `prompts.NAME=EACH` if a run may not have `total` prompts."""
    if total > MAX_PROMPTS:
        raise ConfigError(
            f"prompts.{name}={each}: makes {total} prompts, more than a run may have ({MAX_PROMPTS}); lower it"
        )
