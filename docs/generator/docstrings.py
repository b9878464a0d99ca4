"""Parser for docstrings of methods: paragraphs, and a description of each setting."""

import inspect
import re
from typing import NamedTuple

SECTION = re.compile(r"^(?:Attributes|Args):\n", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


class Described(NamedTuple):
    """Parts of a class's docstring.

    Attributes:
        paragraphs: in order, each joined to one line.
        settings: description of each field, base classes included.
    """

    paragraphs: tuple[str, ...]
    settings: dict[str, str]


def describe(cls: type) -> Described:
    """Split a class's docstring; fields of base classes are included."""
    text = SECTION.split(inspect.cleandoc(cls.__doc__ or ""))[0]
    settings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, *sections = SECTION.split(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        settings |= {name: join(words) for section in sections for name, words in ENTRY.findall(section)}
    return Described(tuple(join(paragraph) for paragraph in text.strip().split("\n\n")), settings)


def join(text: str) -> str:
    """Join lines to one."""
    return " ".join(text.split())
