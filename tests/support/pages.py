"""Pages of the documentation taken apart: blocks of commands, what they need, files that a reader is told to write."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.places import ROOT

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>\w+): (?P<what>.+) -->\n)?```(?P<language>.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE
)
INLINE = re.compile(r"(?<!`)`((?:python|kvbench|make|pip|pytest|torchrun) [^`\n]+)`(?!`)")
MARKS = ("needs", "takes", "file", "at")
"""Marks of a block in the comment above it: a requirement, a long duration, the file that it is written to, or the
commit in whose checkout it runs."""


class Block(NamedTuple):
    """A fenced block of a page: its mark (one of `MARKS`, or empty if it is executed), what the mark says, its text."""

    mark: str
    what: str
    language: str
    text: str


def list_pages() -> list[str]:
    """Return all pages that people write, by path below the checkout."""
    docs = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", "CONTRIBUTING.md", *sorted(p for p in docs if not p.startswith("docs/generated/"))]


def read_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [
        Block(match["mark"] or "", match["what"] or "", match["language"], match["text"])
        for match in FENCE.finditer(text)
    ]


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command of a page, in its blocks and in its lines; variables are filled in.

    Commands of another commit are left out: this one may not know their words.
    """
    variables: dict[str, str] = {}
    for block in read_blocks(text):
        if block.language == "bash" and block.mark != "at":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield from _read_line(line, variables)
    for line in INLINE.findall(FENCE.sub("", text)):
        if "..." not in line and "<" not in line:
            yield shlex.split(line)


def _read_line(line: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the command of a line of a script, without what is set before it; remember variables."""
    filled = re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), line)
    if loop := re.match(r"\s*for (\w+) in (\S+)", filled):
        variables[loop[1]] = loop[2]
        return
    words = shlex.split(filled, comments=True)
    while words and (words[0] in ("time", "export") or re.match(r"\w+=", words[0])):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    words = words[:-1] if words[-1:] == ["&"] else words
    if words and words[0] not in ("done", "wait"):
        yield words
