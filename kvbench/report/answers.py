"""Texts that a model wrote to the user's own prompts, each beside the full cache's."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.core.config import quote_prompt
from kvbench.eval.files.kinds import TEXTS, find_stored_kind
from kvbench.eval.files.texts import TextSet, find_difference
from kvbench.runs.record.results import Results

OWN_PROMPTS = ("PromptFile", "Typed")
"""Classes of the user's own prompts."""
MOST = 4
"""Maximum number of texts that are shown."""
BEFORE, AFTER = 8, 40
"""Largest numbers of a text's lines that are shown, before the first one that differs and from it on."""


def show_answers(console: Console, folder: Path, run: Results) -> None:
    """Print the first texts of a run over the user's own prompts, beside the full cache's.

    The first word that differs is in brackets. Of other runs nothing is printed.

    Raises:
        SampleSetError: a text is missing or damaged.
    """
    name = str(run.setting("prompts._target_")).rsplit(".", 1)[-1]
    if name not in OWN_PROMPTS or find_stored_kind(folder) is not TEXTS:
        return
    shown = range(min(run.n, MOST))
    folders = [folder] if run.reference is None else [folder.parent / run.reference, folder]
    sides = [TextSet(one, shown) for one in folders]
    for index in shown:
        if run.n > 1:
            title = f"prompt {index}: {quote_prompt(sides[0].samples[index].prompt)}"
            console.print(title, markup=False, highlight=False, soft_wrap=True)
        console.print(
            _lay_out(f"{run.method}, budget {run.budget_text}", [_read(one, index) for one in sides])
        )
    if run.n > MOST:
        console.print(f"{run.n - MOST} more texts: {folder / TEXTS.kind}", style="dim", soft_wrap=True)


def _lay_out(label: str, texts: Sequence[str]) -> Table:
    """Return a table of a method's text, right of the full cache's if there are two."""
    table = Table(box=SIMPLE_HEAD, expand=True)
    place = find_difference(texts[0], texts[-1])
    before = texts[0][:place]  # equal texts are shown completely
    if len(texts) > 1:
        words = len(before.split())
        label += ": the same text" if place is None else f": differs after {words} word{'s' * (words != 1)}"
        table.add_column("full cache", ratio=1, overflow="fold")
    table.add_column(Text(label), ratio=1, overflow="fold")
    table.add_row(*(_cut_out(mark_difference(one, place), before.count("\n")) for one in texts))
    return table


def mark_difference(text: str, place: int | None) -> Text:
    """Return a text whose word at a character is in brackets; `[end]` if the text ends before it.

    >>> mark_difference("a red circle, a blue cube", 8).plain, mark_difference("a red", 5).plain
    ('a red [circle,] a blue cube', 'a red[end]')
    """
    if place is None:
        return Text(text)
    word = next((one for one in re.finditer(r"\S+", text) if one.end() > place), None)
    start, end = (len(text), len(text)) if word is None else word.span()
    return Text.assemble(text[:start], (f"[{text[start:end] or 'end'}]", "bold reverse"), text[end:])


def _cut_out(text: Text, line: int) -> Text:
    """Return the lines of a text around one; dots stand for others."""
    lines = text.split("\n")
    first, last = max(0, min(line - BEFORE, len(lines) - BEFORE - AFTER)), line + AFTER
    dots = [Text("...")]
    return Text("\n").join(dots * (first > 0) + lines[first:last] + dots * (last < len(lines)))


def _read(texts: TextSet, index: int) -> str:
    """Return a text and whether it was cut, without control characters, which a terminal could obey."""
    sample = texts.samples[index]
    text = texts.text(index) + ("" if sample.ended else f" (cut at {sample.tokens} tokens)")
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
