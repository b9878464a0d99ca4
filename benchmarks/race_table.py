"""Table of finished races of `task=choose` beside full tables: methods left, after how many prompts, and at what cost.

`left` are the methods left at the end, the leader first. `of the grid` is the share of all samples that were generated;
prompts of calibrations count, in the grid too. `first of all` is the best method of the full tables in `--tables` that
started in the race, with its mean; a row of a table counts if it is at the race's metric and budget. Tables of
differences or of other prompts are not for `--tables`.

python -m benchmarks race_table --runs runs --tables docs/results/data/infinity_tiny/prices.csv [MORE ...] [--csv FILE]
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.arguments import Option
from benchmarks.support.table import read_csv, write_csv
from kvbench.report.tables import format_markdown

OPTIONS = {
    "runs": Option([], "folders of runs with races in them", type=str),
    "tables": Option([], "CSV files of full tables, of one model", type=str),
    "csv": Option("", "file for the table"),
}
ROUNDING = 0.011
"""Maximum difference of a mean between tables, which print two decimals."""
COLUMNS = (
    "race", "margin", "methods", "in the race", "left", "prompts", "samples", "of the grid", "first of all",
)  # fmt: skip
Race = Mapping[str, Any]


def main(options: argparse.Namespace) -> None:
    """Print a row per race, in the order of their titles and margins.

    Raises:
        ValueError: there are no races.
    """
    paths = [path for folder in options.runs for path in Path(folder).glob("races/*/race.json")]
    if not paths:
        raise ValueError(f"--runs {' '.join(options.runs)}: no races; run task=choose first")
    races = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    races.sort(key=lambda race: (race["title"], len(race["entrants"]), -race["rules"]["margin"]))
    tables = [read_csv(Path(path)) for path in options.tables]
    rows = [describe(race, tables) for race in races]
    print(format_markdown([dict(zip(COLUMNS, row, strict=True)) for row in rows]))
    write_csv(options.csv, [COLUMNS, *rows])


def read_mean(cell: str) -> float | None:
    """Return the mean in a cell of a table, which may be bold; None if there is none."""
    number = re.match(r"\**(-?[\d.]+)", cell)
    return None if number is None else float(number[1])


def describe(race: Race, tables: Iterable[list[dict[str, str]]]) -> tuple[str, ...]:
    """Return the cells of a race's row, in the order of the printed columns."""
    looks, calibrations = race["looks"], sum(race["calibrated"].values())
    course = ", ".join(f"{len(look['means'])} after {look['after']}" for look in looks[:3])
    means = find_means(tables, race)
    pick = max if race["rules"]["higher"] else min
    best = pick(means, key=means.__getitem__) if means else None
    return (
        race["title"],
        f"{race['rules']['margin']:g}",
        str(len(race["entrants"])),
        course,
        ", ".join(f"`{method}`" for method in looks[-1]["means"]),
        str(looks[-1]["after"]),
        f"{race['drawn'] + calibrations}",
        f"{(race['drawn'] + calibrations) / (race['grid'] + calibrations):.3f}",
        "" if best is None else f"`{best}` {means[best]:g}",
    )


def find_means(tables: Iterable[list[dict[str, str]]], race: Race) -> dict[str, float]:
    """Return the means of the race's methods in full tables, by method.

    A table has a column of budgets and one of the metric, or a column of means per budget.

    Raises:
        SystemExit: two rows give a method means that differ by more than rounding.
    """
    _, budget, metric = race["title"].split(", ")
    budget, means = budget.removeprefix("budget "), {}
    for row in (row for table in tables for row in table):
        if row.get("budget", budget) != budget or row.get("method") not in race["entrants"]:
            continue
        names = (
            (f"{metric} ↑", f"{metric} ↓", budget) if "budget" not in row else (f"{metric} ↑", f"{metric} ↓")
        )
        mean = read_mean(next((row[name] for name in names if row.get(name)), ""))
        if mean is not None and abs(means.setdefault(row["method"], mean) - mean) > ROUNDING:
            raise SystemExit(
                f"--tables: {row['method']} has {means[row['method']]} and {mean} at {budget}; "
                "name full tables of the same prompts only"
            )
    return means
