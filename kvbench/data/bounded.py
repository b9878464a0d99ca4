"""Tables of other people, read within bounds on their rows and texts."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.config import ConfigError
from kvbench.core.files import check_file
from kvbench.data.frames import import_polars

if TYPE_CHECKING:
    import polars


MOST_BYTES = 2**30
"""Most bytes of texts that are read from a table."""


class TooLargeError(ConfigError):
    """A table holds more than its records give: rows, bytes of texts, or columns of other types."""


def read_table(path: Path, most: int, run: str | None = None) -> "polars.DataFrame":
    """Read a Parquet file of at most `most` rows of numbers and texts.

    A file of a kilobyte may hold millions of rows, or gigabytes of one repeated text.

    Args:
        path: the file.
        most: number of rows that the records give.
        run: value of the column `folder` in the rows that are read and counted; None for all.

    Raises:
        TooLargeError: there are more rows, `MOST_BYTES` or more of texts, or columns of other types.
        ConfigError: polars is not installed.
    """
    library = import_polars()
    rows = library.scan_parquet(check_file(path), glob=False)
    if run is not None:
        rows = rows.filter(library.col("folder") == run)
    count = rows.select(library.len()).collect().item()  # first, as texts take memory for each row
    if count > most:
        raise TooLargeError(
            f"{path.name}: has {count} rows, the records give {most} at most; copy the dataset again"
        )
    kinds, plain = rows.collect_schema(), (library.String, library.Boolean, library.Null)
    if other := [name for name, kind in kinds.items() if not (kind.is_numeric() or kind in plain)]:
        raise TooLargeError(f"{path.name}: {other[0]!r:.60} is no column of numbers or texts; copy it again")
    texts = [library.col(name) for name, kind in kinds.items() if kind == library.String]
    sizes = [text.str.len_bytes().cast(library.UInt64).sum() for text in texts]
    if sizes and sum(rows.select(sizes).collect().row(0)) >= MOST_BYTES:
        raise TooLargeError(f"{path.name}: has a gibibyte of texts or more, which is not read; copy it again")
    table: polars.DataFrame = rows.collect()
    return table
