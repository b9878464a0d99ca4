"""Docstrings of methods as text for a page: what is said, and what is said of each setting."""

import inspect
import re
from typing import NamedTuple

SECTION = re.compile(r"^(?:Attributes|Args):\n", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


class Described(NamedTuple):
    """What a class says of itself.

    Attributes:
        paragraphs: in order, each on one line.
        settings: by field, its description; those of base classes come along.
    """

    paragraphs: tuple[str, ...]
    settings: dict[str, str]


def describe(cls: type) -> Described:
    """Return a class's docstring, split up; fields are looked up in its bases as well."""
    text = SECTION.split(inspect.cleandoc(cls.__doc__ or ""))[0]
    settings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, *sections = SECTION.split(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        settings |= {name: join(words) for section in sections for name, words in ENTRY.findall(section)}
    return Described(tuple(join(paragraph) for paragraph in text.strip().split("\n\n")), settings)


def join(text: str) -> str:
    """Put lines into one."""
    return " ".join(text.split())
