"""Command `kvbench list`: the choices of a group, one line each."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.help import HELP, read_help
from kvbench.cli.config.search_path import describe_choice, list_variants, make_each
from kvbench.cli.console import CONSOLE, say
from kvbench.core.config import ConfigError
from kvbench.core.suggestions import LISTS, find_near

GROUPS = {kind: group for group, kind in LISTS.items()}
USAGE = f"kvbench list {'|'.join(GROUPS)} [WORD]"
HEADS = {
    "method": ("method", "models", "calib.", "paper", "what it keeps"),
    "model": ("model", "family", "weights", "what it is"),
}
"""Titles of the columns of groups that have more than a name and a description."""
Row = tuple[str, ...]


def show_list(words: Sequence[str]) -> None:
    """Print a line for each choice of a kind, or for those whose line has a word.

    Lines end at the width of a terminal; with a word they are whole, and variants in folders are listed too.

    Args:
        words: words of the command after `list`.

    Raises:
        ConfigError: the first word is no kind, no line has the second, or there are more.
    """
    if set(HELP) & set(words):
        say(f"usage: {USAGE}")
        return
    words = [word for word in words if not word.startswith("hydra.searchpath=")]  # which Hydra reads itself
    kind, word = (*words, "", "")[:2]
    if kind not in GROUPS or len(words) > 2:
        near = find_near(kind, GROUPS)
        meant = "" if near is None else f" did you mean {near}?"
        raise ConfigError(f"{' '.join(('list', *words))}: not a kind and a word;{meant} {USAGE}")
    if kind == "tasks":
        parts, hidden = read_help().split("\n\n")[2:-1], 0
        lines = [line for part in parts for line in part.splitlines()[1:]]
        rows: list[Row] = [(line,) for line in lines if word.lower() in line.lower()]
    else:
        with hydra_of_kvbench():
            rows, hidden = list_rows(GROUPS[kind], word)
    if not rows:
        raise ConfigError(f"list {kind} {word}: no line has this word; kvbench list {kind} has all")
    for line in align(rows, None if word or not CONSOLE.is_terminal else CONSOLE.width):
        say(line)
    if hidden:
        say(f"and {hidden} variants in folders: kvbench list {kind} /")


def list_rows(group: str, word: str) -> tuple[list[Row], int]:
    """Return the rows of a group's choices that have a word, with a title, and the number of variants left out."""
    every = list_variants(group)
    names = [name for name in every if word or "/" not in name]
    rows: list[Row] = [(name,) for name in names]
    if group in HEADS:
        describe = describe_method if group == "method" else describe_model
        rows = [(name, *describe(name, one)) for name, one in make_each(group, names)]
    rows = [(*row, summarise(describe_choice(group, row[0]))) for row in rows]
    found = [row for row in rows if word.lower() in " ".join(row).lower()]
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


def align(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yield rows as lines with columns of one width, cut at the width of a terminal if there is one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(map(str.ljust, row, widths)).rstrip()
        yield line if width is None or len(line) <= width else f"{line[: width - 3]}..."
