"""Correct outputs that texts contain, as RULER's official code counts them (Hsieh et al., arXiv:2404.06654)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.text.answers import AnswerChange, Answers
from kvbench.eval.text.full_cache import STRING_MATCH_ALL, STRING_MATCH_PART

OUTPUTS = "outputs"
"""Key of the correct outputs in a prompt's metadata."""


def check_outputs(outputs: object) -> Sequence[str]:
    """Return the `outputs` of a prompt's metadata after a check.

    Raises:
        ValueError: they are not a list of one or more strings, or one is empty, which every text contains.
    """
    if not isinstance(outputs, list) or not outputs or not all(isinstance(o, str) and o for o in outputs):
        raise ValueError(f"`{OUTPUTS}` must be a list of non-empty strings")
    return outputs


def find_outputs(text: str, outputs: Sequence[str]) -> list[bool]:
    r"""Return whether a text contains each output, regardless of case.

    Control characters inside the text count as line breaks; at its ends they are ignored.

    >>> find_outputs("\tMadrid and\tRome", ["rome", "and\nrome", "Oslo"])
    [True, True, False]
    """
    found = re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip().lower()
    return [output.lower() in found for output in outputs]


@dataclass(frozen=True)
class StringMatchAll(Answers):
    """`string_match_all`: mean over texts of the share of correct outputs that a text contains."""

    name: ClassVar[str] = STRING_MATCH_ALL
    protocol: ClassVar[str] = "ruler"
    required_meta: ClassVar[str] = OUTPUTS
    correct: ClassVar[tuple[str, str]] = ("output", "(prompts=needles, chains, word_counts and ruler do)")
    meta_keys: ClassVar[tuple[str, ...]] = (OUTPUTS,)

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check the outputs of one prompt; raise ValueError if they are missing or malformed."""
        super().check_meta(meta)
        check_outputs(meta[OUTPUTS])

    def grade(self, text: str, correct: object) -> float:
        """Return the share of the outputs `correct` that a text contains, thoughts included."""
        found = find_outputs(text, check_outputs(correct))
        return sum(found) / len(found)


@dataclass(frozen=True)
class StringMatchPart(StringMatchAll):
    """`string_match_part`: share of texts that contain any of their correct outputs."""

    name: ClassVar[str] = STRING_MATCH_PART

    def grade(self, text: str, correct: object) -> float:
        """Return 1 if the text contains one of the outputs `correct`, else 0."""
        return float(any(find_outputs(text, check_outputs(correct))))


@dataclass(frozen=True)
class StringMatchAllChange(AnswerChange, StringMatchAll):
    """`string_match_all_change`: difference of `string_match_all` to the reference run, by question."""

    name: ClassVar[str] = f"{STRING_MATCH_ALL}_change"


@dataclass(frozen=True)
class StringMatchPartChange(AnswerChange, StringMatchPart):
    """`string_match_part_change`: difference of `string_match_part` to the reference run, by question."""

    name: ClassVar[str] = f"{STRING_MATCH_PART}_change"
