"""Finished runs and their samples as polars frames (docs/data.md)."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json
from kvbench.data.flatten import FIXED, SAMPLE, Kinds, Row, Value, find_kinds, merge_kinds, order_columns
from kvbench.data.optional import import_polars
from kvbench.data.row_cache import Lines, load_rows, scan_results
from kvbench.runs.record.results import FILE

if TYPE_CHECKING:
    import polars as pl

RECORDS = "samples.jsonl"
SCORES = ".samples.jsonl"
"""Suffix of evaluators' per-sample files in a run's `metrics`."""


def runs_df(runs_dir: Path | str = "runs") -> "pl.DataFrame":
    """Return a row for each finished run under a folder: what it is, memory, time, and every metric with its interval.

    Rows are cached in `<runs_dir>/.rows.parquet`, which may be deleted at any time.

    Raises:
        ConfigError: there is no such folder, a run's results are damaged, or polars is missing.
    """
    return _make_frame(load_rows(_check_folder(runs_dir)), FIXED)


def samples_df(source: Path | str | Iterable[Path | str] = "runs") -> "pl.DataFrame":
    """Return a row for each sample of finished runs: its prompt, what it cost, and its value of every metric.

    Args:
        source: a folder of runs, or some runs' own folders; their files are read, nothing is cached.

    Raises:
        ConfigError: there is no such folder, a run is not finished, its files are damaged, or polars is missing.
    """
    if isinstance(source, Path | str):
        root = _check_folder(source)
        folders = sorted(root / folder for folder, _ in scan_results(root))
    else:
        folders = [Path(folder) for folder in source]
    rows = [row for folder in folders for row in list_samples(folder)]
    kinds = merge_kinds(map(find_kinds, rows))
    return _make_frame(Lines([json.dumps(row).encode() for row in rows], kinds), SAMPLE)


def list_samples(folder: Path) -> list[Row]:
    """Return a row for each sample of a finished run: SAMPLE's columns, and what evaluators found, numbers and answers.

    Raises:
        ConfigError: the run is not finished, or a file of it is damaged.
    """
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder}: is not a finished run; it has no {FILE}")
    place = f"{folder.absolute().parent.name}/{folder.absolute().name}"
    found: dict[int, dict[str, Value]] = {}
    for index, line in _read_lines(folder / RECORDS):
        found[index] = {
            "folder": place,
            **{name: _keep(line.get(name)) for name in SAMPLE if name != "folder"},
        }
    for path in sorted((folder / "metrics").glob(f"*{SCORES}")):
        for index, line in _read_lines(path):
            values = {
                name: value for name, value in line.items() if value is None or isinstance(value, int | float)
            }
            found[index] = {**values, **found.get(index, {})}
    return [found[index] for index in sorted(found)]


def _keep(value: object) -> Value:
    return value if isinstance(value, str | int | float) else None


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the objects of a file of JSON lines, each with its `index`."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            values = parse_json(line, finite=True)
            yield int(values["index"]), values
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: damaged ({type(error).__name__} {error}); run it again") from None


def _make_frame(rows: Lines, fixed: Kinds) -> "pl.DataFrame":
    """Return rows as a frame: the fixed columns, and those that hold anything."""
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
