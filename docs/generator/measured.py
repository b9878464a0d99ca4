"""Reader for the tables of `docs/results.md` and the commands that made them."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Table(NamedTuple):
    """A table with one row per method.

    Attributes:
        section: heading above it.
        caption: the paragraph before it, if that ends in a colon.
        commands: the block of commands under that heading, with its mark.
        header: column names; the first is `method`.
        rows: cells, as many as columns.
    """

    section: str
    caption: str
    commands: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def pick_rows(self, method: str) -> "Table":
        """Return the table with only the rows of one method; a setting may follow its name after a comma."""
        return self._replace(rows=tuple(row for row in self.rows if row[0].partition(",")[0] == method))


def read_tables(text: str) -> list[Table]:
    """Return the tables of methods in a page."""
    return [table for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:] for table in _read(section)]


def _read(section: str) -> Iterator[Table]:
    heading = section.partition("\n")[0]
    commands, before = "", ""
    for part in re.split(r"\n\n+", section):
        if part.startswith("<!-- takes: "):
            commands = part
        elif part.startswith("| method |"):
            header, _, *rows = (_split(line) for line in part.splitlines())
            caption = before if before.endswith(":") else ""
            yield Table(heading, caption, commands, header, tuple(rows))
        before = part


def _split(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
