"""Frames as files: `task=export`."""

from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import write_beside
from kvbench.data.frames import runs_df, samples_df
from kvbench.data.optional import import_polars


def export_frames(runs_dir: Path, form: str, output: Path | None = None) -> list[Path]:
    """Write `runs.<form>` and `samples.<form>` of a folder of runs, whole or not at all; return their paths.

    Args:
        runs_dir: the folder.
        form: `parquet` or `csv`.
        output: folder of the files; None for that of the runs.

    Raises:
        ConfigError: it holds no finished runs, one of them is damaged, or polars is missing.
    """
    import_polars()
    runs = runs_df(runs_dir)
    if runs.is_empty():
        raise ConfigError(f"runs_dir={runs_dir}: holds no finished runs")
    paths = []
    for name, frame in (("runs", runs), ("samples", samples_df(runs_dir))):
        path = (output or runs_dir) / f"{name}.{form}"
        with write_beside(path) as beside:
            if form == "csv":
                frame.write_csv(beside)
            else:
                frame.write_parquet(beside)
        paths.append(path)
    return paths
