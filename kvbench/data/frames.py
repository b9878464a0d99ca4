"""Finished runs and their samples as polars frames (docs/data.md)."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.config import ConfigError
from kvbench.core.files import write_whole
from kvbench.data.flatten import (
    FIXED,
    SAMPLE,
    ColumnTypes,
    FlatRow,
    Value,
    find_kinds,
    flatten_run,
    merge_kinds,
    order_columns,
)
from kvbench.data.row_cache import JsonRows, import_polars, load_rows, scan_results
from kvbench.runs.record.earlier import is_earlier
from kvbench.runs.record.folder import read_records
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.record.samples import read_finished, read_values

if TYPE_CHECKING:
    import polars as pl


def runs_df(runs_dir: Path | str = "runs") -> "pl.DataFrame":
    """Return a row for each finished run under a folder: identity, memory, time, and metrics with intervals.

    Rows are cached in `<runs_dir>/.rows.parquet`, which may be deleted at any time.

    Raises:
        ConfigError: there is no such folder, a run's results are damaged, or polars is missing.
    """
    return _make_frame(load_rows(_check_folder(runs_dir)), FIXED)


def frame_runs(runs: Mapping[str, Results]) -> "pl.DataFrame":
    """Return the rows of `runs_df` of runs by folder.

    Raises:
        ConfigError: polars is missing.
    """
    rows: list[FlatRow] = [{"folder": folder, **flatten_run(run)} for folder, run in runs.items()]
    kinds = merge_kinds(map(find_kinds, rows))
    return _make_frame(JsonRows([json.dumps(row).encode() for row in rows], kinds), FIXED)


def samples_df(source: Path | str | Iterable[Path | str] = "runs") -> "pl.DataFrame":
    """Return a row for each sample of finished runs: prompt, cost and metrics.

    Args:
        source: a folder of runs, or the folders of single runs; nothing is cached.

    Raises:
        ConfigError: there is no such folder, a run is not finished, its files are damaged, or polars is missing.
    """
    if isinstance(source, Path | str):
        root = _check_folder(source)
        folders = sorted(root / folder for folder, _ in scan_results(root) if not is_earlier(root / folder))
    else:
        folders = [Path(folder) for folder in source]
    rows = [row for folder in folders for row in list_samples(folder)]
    kinds = merge_kinds(map(find_kinds, rows))
    return _make_frame(JsonRows([json.dumps(row).encode() for row in rows], kinds), SAMPLE)


def list_samples(folder: Path) -> list[FlatRow]:
    """Return a row for each sample of a finished run: the columns of `SAMPLE` and the values of evaluators.

    Raises:
        ConfigError: the run is not finished, or one of its files is damaged.
    """
    results = read_finished(folder)
    if results is None:
        raise ConfigError(f"{folder}: is not a finished run; it has no {FILE}")
    place = f"{folder.absolute().parent.name}/{folder.absolute().name}"
    rows: dict[int, dict[str, Value]] = {}
    for index, line in read_records(folder).items():
        cells = {name: line.get(name) for name in SAMPLE if name != "folder"}
        plain = {key: cell if isinstance(cell, str | int | float) else None for key, cell in cells.items()}
        rows[index] = {"folder": place, **plain}
    for index, line in read_values(folder, results):
        values = {
            name: value for name, value in line.items() if value is None or isinstance(value, int | float)
        }
        rows[index] = {**values, **rows[index]}
    return list(rows.values())


def _make_frame(rows: JsonRows, fixed: ColumnTypes) -> "pl.DataFrame":
    """Return rows as a frame of the fixed columns and other columns that are not empty."""
    polars = import_polars()
    types = {"bool": polars.Boolean, "int": polars.Int64, "float": polars.Float64, "text": polars.String}
    kinds = {**rows.kinds, **fixed}
    schema = {name: types[kinds[name]] for name in order_columns(kinds, fixed) if kinds[name] != "null"}
    if not rows.texts:
        return polars.DataFrame(schema=schema)
    return polars.read_ndjson(b"\n".join(rows.texts), schema=schema)


def _check_folder(path: Path | str) -> Path:
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(f"runs_dir={path}: no such folder")
    return root


def export_frames(runs_dir: Path, form: str, output: Path | None = None) -> list[Path]:
    """Write `runs.<form>` and `samples.<form>` of a folder of runs, each whole or not at all; return their paths.

    Raises:
        ConfigError: the folder holds no finished runs, a run is damaged, or polars is missing.
    """
    runs = runs_df(runs_dir)
    if runs.is_empty():
        raise ConfigError(f"runs_dir={runs_dir}: holds no finished runs")
    paths = []
    for name, frame in (("runs", runs), ("samples", samples_df(runs_dir))):
        paths.append((output or runs_dir) / f"{name}.{form}")
        write_frame(frame, paths[-1])
    return paths


def write_frame(frame: "pl.DataFrame", path: Path) -> None:
    """Write a frame atomically, as CSV or Parquet by the path's suffix.

    Raises:
        OSError: the file cannot be written; polars has errors of its own for a full disk.
    """
    content = io.BytesIO()
    (frame.write_csv if path.suffix == ".csv" else frame.write_parquet)(content)
    write_whole(path, content.getvalue())
