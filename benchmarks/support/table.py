"""Tables of the benchmarks, printed row by row while they are measured."""

from collections.abc import Mapping


class Table:
    """Aligned columns: names to the left, numbers to the right.

    Args:
        columns: format of the numbers by heading, such as ".2f".
        label: heading of the names.
        width: columns of the names.
    """

    def __init__(self, columns: Mapping[str, str], label: str = "", width: int = 20) -> None:
        self._label, self._formats = width, tuple(columns.values())
        self._widths = tuple(max(len(name) + 2, 10) for name in columns)
        self._print(label, tuple(columns))

    def add(self, name: str, *cells: object) -> None:
        """Print a row; None leaves a cell empty, and cells at the end may be left out."""
        formats = self._formats[: len(cells)]
        self._print(
            name,
            tuple("" if x is None else format(x, form) for x, form in zip(cells, formats, strict=True)),
        )

    def _print(self, name: str, cells: tuple[str, ...]) -> None:
        print(
            f"{name:{self._label}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, self._widths, strict=False)),
            flush=True,
        )
