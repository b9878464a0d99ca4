"""Tables of other people, read within a bound on their rows."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.config import ConfigError
from kvbench.data.row_cache import import_polars

if TYPE_CHECKING:
    import polars


class TooManyRowsError(ConfigError):
    """A table has more rows than its records give."""


def read_table(path: Path, most: int, run: str | None = None) -> "polars.DataFrame":
    """Read a Parquet file of at most `most` rows, which a small file may exceed by millions.

    Args:
        path: the file.
        most: number of rows that the records give.
        run: value of the column `folder` in the rows that are read and counted; None for all.

    Raises:
        TooManyRowsError: there are more.
        ConfigError: polars is not installed.
    """
    library = import_polars()
    rows = library.scan_parquet(path, glob=False)
    if run is not None:
        rows = rows.filter(library.col("folder") == run)
    count = rows.select(library.len()).collect().item()
    if count > most:
        raise TooManyRowsError(
            f"{path.name}: has {count} rows, the records give {most} at most; copy the dataset again"
        )
    table: polars.DataFrame = rows.collect()
    return table
