"""Tables of `docs/results/`: each is a file of `docs/results/data/`, which pages show below its commands."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = "docs/results"
MARK = re.compile(r"<!-- made by `make docs` from (data/[\w/]+\.csv) -->$")


class Table(NamedTuple):
    """A table with one row per method.

    Attributes:
        page: file name in `docs/results`.
        section: heading above it.
        caption: the paragraph before it, if that ends in a colon.
        commands: the block of commands under that heading, with its mark.
        header: column names; the first is `method`.
        rows: cells, as many as columns.
    """

    page: str
    section: str
    caption: str
    commands: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def pick_rows(self, method: str) -> "Table":
        """Return the table with only the rows of one method; a setting may follow its name after a comma."""
        return self._replace(rows=tuple(row for row in self.rows if row[0].partition(",")[0] == method))


def read_rows(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of a CSV file; the first has the column names.

    Raises:
        ValueError: a row has more or fewer cells than the first.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [tuple(row) for row in csv.reader(stream)]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{path}: rows differ in their number of cells")
    return rows


def read_sections(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the page and the text, from its heading on, of every section of the results of a checkout."""
    for path in sorted((root / FOLDER).glob("*.md")):
        for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            yield path.name, section


def read_tables(root: Path) -> list[Table]:
    """Return the tables of methods in the results of a checkout."""
    return [table for page, section in read_sections(root) for table in _read(root / FOLDER, page, section)]


def _read(folder: Path, page: str, section: str) -> Iterator[Table]:
    heading = section.partition("\n")[0]
    commands, before = "", ""
    for part in re.split(r"\n\n+", section):
        if part.startswith(("<!-- takes: ", "<!-- at: ")):
            commands = part
        elif mark := MARK.match(part):
            header, *rows = read_rows(folder / mark[1])
            if header[0] == "method":
                caption = before if before.endswith(":") else ""
                yield Table(page, heading, caption, commands, header, tuple(rows))
        before = part
