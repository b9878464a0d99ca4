"""Command `kvbench list`: the choices of a group, one line each."""

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.help import read_help
from kvbench.cli.config.search_path import describe_choice, list_variants, make_each
from kvbench.cli.console import CONSOLE, say
from kvbench.core.config import ConfigError
from kvbench.core.suggestions import LISTS, find_near

GROUPS = {kind: group for group, kind in LISTS.items()}
USAGE = f"kvbench list {'|'.join(GROUPS)} ... [WORD ...]"
HEADS = {
    "method": ("method", "models", "calib.", "paper", "what it keeps"),
    "model": ("model", "family", "weights", "what it is"),
}
"""Titles of the columns of groups that have more than a name and a description."""
Row = tuple[str, ...]


def show_list(words: Sequence[str]) -> None:
    """Print a line for each choice of the named kinds whose line has all other words; without words, list the kinds.

    Lines end at the width of a terminal; with a word they go on below, and variants in folders are listed too.

    Args:
        words: words of the command after `list`.

    Raises:
        ConfigError: no word is a kind, or no line has all other words.
    """
    words = [word for word in words if not word.startswith("hydra.searchpath=")]  # Hydra reads this key
    kinds = [word for word in dict.fromkeys(words) if word in GROUPS]
    if words and not kinds:
        near = find_near(words[0], GROUPS)
        meant = "" if near is None else f" did you mean {near}?"
        raise ConfigError(f"{' '.join(('list', *words))}: not a kind and words;{meant} {USAGE}")
    for kind, group in GROUPS.items() if not words else ():
        say(f"kvbench list {kind:<9} {group}=...")
    asked = [word.lower() for word in words if word not in kinds]
    with hydra_of_kvbench():
        found = {kind: list_rows(GROUPS[kind], asked) for kind in kinds}
    if kinds and not any(rows for rows, _ in found.values()):
        raise ConfigError(f"list {' '.join(words)}: no line matches; see kvbench list {kinds[0]}")
    for kind, (rows, hidden) in found.items():
        if len(kinds) > 1 and rows:
            say(f"== {kind} ==")
        for line in align(rows, CONSOLE.width if CONSOLE.is_terminal else None, whole=bool(asked)):
            say(line)
        if hidden:
            say(f"and {hidden} variants in folders: kvbench list {kind} /")


def list_rows(group: str, words: Sequence[str]) -> tuple[list[Row], int]:
    """Return the rows of a group's choices that have all words, with a title, and the number of variants left out."""
    every = list_variants(group)
    names = [name for name in every if words or "/" not in name]
    rows: list[Row] = [(name,) for name in names]
    if group in HEADS:
        describe = describe_method if group == "method" else describe_model
        rows = [(name, *describe(name, one)) for name, one in make_each(group, names)]
    rows = [(*row, summarise(describe_choice(group, row[0]))) for row in rows]
    if group == "task":
        parts = read_help().split("\n\n")[2:-1]
        rows = [(line,) for part in parts for line in part.splitlines()[1:]]
    found = [row for row in rows if all(word in " ".join(row).lower() for word in words)]
    titles = [HEADS[group]] if found and group in HEADS else []
    return [*titles, *found], len(every) - len(names)


def split_paper(text: str) -> tuple[str, str]:
    """Return a method's comment without the paper that it ends with in brackets, and the paper.

    >>> split_paper("Heavy hitters. [H2O, arXiv:2306.14048]")
    ('Heavy hitters.', 'H2O, arXiv:2306.14048')
    """
    what, _, paper = text.partition(" [") if text.endswith("]") else (text, "", "")
    return what, paper.removesuffix("]")


def summarise(text: str) -> str:
    """Return the first sentence of a comment, without the command that it may name."""
    return re.split(r"(?<=[\w)])\. |: python run", split_paper(text)[0])[0].rstrip(".")


def describe_method(name: str, method: Any) -> Row:
    """Return the models that a method is for, whether it needs a calibration, and where its base was published."""
    families = [f"{family.removeprefix('next-')}s" for family in method.families]
    paper = split_paper(describe_choice("method", name.partition("/")[0]))[1].rpartition(", ")[2]
    return families[0] if len(families) == 1 else "both", "-" if method.needs() is None else "yes", paper


def describe_model(_: str, model: Any) -> Row:
    """Return the family of a model and where its weights are."""
    sources = model.sources.values()
    repo = next((source.repo for source in sources if source.repo), None)
    is_shipped = any(str(source.path).startswith("pkg://") for source in sources)
    return type(model).__module__.split(".")[-2], "shipped" if is_shipped else repo or "yours"


def align(rows: Sequence[Row], width: int | None, *, whole: bool = False) -> Iterator[str]:
    """Yield rows as lines with columns of one width; a terminal's `width` cuts them, or breaks the last cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(map(str.ljust, row, widths)).rstrip()
        if width is None or len(line) <= width:
            yield line
        elif whole:
            column = sum(length + 2 for length in widths[:-1])
            yield from wrap(line, width, subsequent_indent=" " * min(column, width - 24))
        else:
            yield f"{line[: width - 3]}..."
