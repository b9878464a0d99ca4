"""Classes of table columns by the length of their texts, for the site's style sheet."""

from docutils import nodes
from sphinx.application import Sphinx

SHORT, PHRASE = 28, 60
"""Largest number of characters of a cell that stays on one line, and of one that needs no wide column."""


def mark_columns(_: Sphinx, doctree: nodes.document) -> None:
    """Give every cell of a table the class of its column: `short`, `phrase` or `prose`, by its longest cell.

    Headings do not count: a short column keeps its width under a long name.
    """
    for group in doctree.findall(nodes.tgroup):
        [body] = [part for part in group.children if isinstance(part, nodes.tbody)]
        for column in zip(*(row.children for row in group.findall(nodes.row)), strict=True):
            lengths = [len(cell.astext()) for cell in column if cell.parent.parent is body]
            kind = name_column(max(lengths, default=0))
            for cell in column:
                cell["classes"].append(kind)


def name_column(length: int) -> str:
    """Return the class of a column by the characters of its longest cell."""
    if length <= SHORT:
        return "short"
    return "phrase" if length <= PHRASE else "prose"
