"""Texts that a model wrote for the user's own prompts, each beside the full cache's text."""

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
"""Lines shown before the first different one (more near the end of a text), and from it on."""


def show_answers(console: Console, folder: Path, run: Results) -> None:
    """Print the first texts of a run over the user's own prompts, beside the full cache's; nothing for other runs.

    The first word that differs is in brackets.

    Raises:
        SampleSetError: a text is missing or damaged.
    """
    name = str(run.setting("prompts._target_")).rsplit(".", 1)[-1]
    if name not in OWN_PROMPTS or find_stored_kind(folder) is not TEXTS:
        return
    shown = range(min(run.n, MOST))
    folders = [folder] if run.reference is None else [folder.parent / run.reference, folder]
    sides = [TextSet(sample_folder, shown) for sample_folder in folders]
    for index in shown:
        if run.n > 1:
            title = f"prompt {index}: {quote_prompt(sides[0].samples[index].prompt)}"
            console.print(title, markup=False, highlight=False, soft_wrap=True)
        console.print(
            _lay_out(f"{run.method}, budget {run.budget_text}", [_read(side, index) for side in sides])
        )
    if run.n > MOST:
        console.print(f"{run.n - MOST} more texts: {folder / TEXTS.kind}", style="dim", soft_wrap=True)


def _lay_out(label: str, texts: Sequence[str]) -> Table:
    """Return a table of a method's text, right of the full cache's if there are two."""
    table = Table(box=SIMPLE_HEAD, expand=True)
    index = find_difference(texts[0], texts[-1])
    before = texts[0][:index]  # equal texts are shown completely
    if len(texts) > 1:
        count = len(before.split())
        label += ": the same text" if index is None else f": differs after {count} word{'s' * (count != 1)}"
        table.add_column("full cache", ratio=1, overflow="fold")
    table.add_column(Text(label), ratio=1, overflow="fold")
    table.add_row(*(_cut_out(mark_difference(text, index), before.count("\n")) for text in texts))
    return table


def mark_difference(text: str, index: int | None) -> Text:
    """Return a text with the word at or after character `index` in brackets, `[end]` without one; None marks nothing.

    >>> mark_difference("a red circle, a blue cube", 8).plain, mark_difference("a red", 5).plain
    ('a red [circle,] a blue cube', 'a red[end]')
    """
    if index is None:
        return Text(text)
    word = next((match for match in re.finditer(r"\S+", text) if match.end() > index), None)
    start, end = (len(text), len(text)) if word is None else word.span()
    return Text.assemble(text[:start], (f"[{text[start:end] or 'end'}]", "bold reverse"), text[end:])


def _cut_out(text: Text, line: int) -> Text:
    """Return the lines of a text around line `line`, with `...` for those left out."""
    lines = text.split("\n")
    first, last = max(0, min(line - BEFORE, len(lines) - BEFORE - AFTER)), line + AFTER
    dots = [Text("...")]
    return Text("\n").join(dots * (first > 0) + lines[first:last] + dots * (last < len(lines)))


def _read(texts: TextSet, index: int) -> str:
    """Return a text, with a note if it was cut, without control characters, which a terminal could obey."""
    sample = texts.samples[index]
    text = texts.text(index) + ("" if sample.ended else f" (cut at {sample.tokens} tokens)")
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
