"""Tables that are printed row by row during a measurement, and tables as CSV files."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbench.core.files import write_whole


class Table:
    """Table with left-aligned names and right-aligned numbers.

    Args:
        columns: number formats by heading, such as ".2f".
        label: heading of the names.
        width: width of the names.
    """

    def __init__(self, columns: Mapping[str, str], label: str = "", width: int = 20) -> None:
        self._name_width, self._formats = width, tuple(columns.values())
        self._widths = tuple(max(len(name) + 2, 10) for name in columns)
        self._print(label, tuple(columns))

    def add(self, name: str, *cells: object) -> None:
        """Print a row; None is an empty cell, and trailing cells may be omitted."""
        formats = self._formats[: len(cells)]
        self._print(
            name, tuple("" if x is None else format(x, form) for x, form in zip(cells, formats, strict=True))
        )

    def _print(self, name: str, cells: tuple[str, ...]) -> None:
        print(
            f"{name:{self._name_width}}"
            + "".join(f"{c:>{w}}" for c, w in zip(cells, self._widths, strict=False)),
            flush=True,
        )


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, each with its cells by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: str, rows: Iterable[Iterable[str]]) -> None:
    """Write rows, the header first, as a CSV file, and make its folder; an empty path writes nothing."""
    if path:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_whole(Path(path), text.getvalue())
