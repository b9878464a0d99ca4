"""Order of methods in tables of two models: means with ranks side by side, and Spearman's rank correlation.

Methods that both models' tables have at a budget count; of a method that several tables of a model have, the first row
is read. A model is named after its tables' folder. The last rows are the rank correlation at each budget, of all
methods and of methods ahead of `random` in the first model's tables: bad methods are often bad on both models.

python -m benchmarks orders --first docs/results/data/infinity_tiny/every_method.csv [MORE ...]
  --second docs/results/data/infinity_emoji/methods.csv [--metric psnr] [--csv FILE]
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import rankdata, spearmanr

from benchmarks.race_table import read_mean
from benchmarks.support.arguments import Option
from benchmarks.support.table import read_csv, write_csv
from kvbench.report.tables import format_markdown

OPTIONS = {
    "first": Option(
        [], "CSV files of one model's tables, with columns method, budget and the metric", type=str
    ),
    "second": Option([], "CSV files of another model's tables, likewise", type=str),
    "metric": Option("psnr", "metric whose larger values are better"),
    "csv": Option("", "file for the table"),
}
LAST = "rank correlation"
AHEAD = "the same, of those ahead of `random` on the first"
BASELINE = "random"
Means = dict[tuple[str, str], float]
"""Means of a metric by (budget, method)."""


def main(options: argparse.Namespace) -> None:
    """Print a row per method.

    Raises:
        ValueError: the tables share fewer than two methods at a budget, or are of one model.
    """
    paths = [[Path(path) for path in side] for side in (options.first, options.second)]
    first, second = (read_means(side, options.metric) for side in paths)
    if not (shared := first.keys() & second.keys()):
        raise ValueError("--first and --second: no method and budget is in both tables")
    names = [side[0].parent.name for side in paths]
    if names[0] == names[1]:
        raise ValueError(f"--first and --second: both are of {names[0]}; name tables of two models")
    budgets = sorted({budget for budget, _ in shared}, key=float)
    rows: dict[str, dict[str, str]] = {method: {"method": method} for _, method in sorted(shared)}
    rows |= {name: {"method": name} for name in (LAST, AHEAD)}
    for budget in budgets:
        methods = sorted(method for at, method in shared if at == budget)
        if len(methods) < 2:
            raise ValueError(f"--first and --second: have one method in common at {budget}; orders need two")
        sides = [[means[budget, method] for method in methods] for means in (first, second)]
        for name, values in zip(names, sides, strict=True):
            for method, cell in zip(methods, format_ranked(values), strict=True):
                rows[method][f"{name} {budget}"] = cell
        rows[LAST][f"{names[1]} {budget}"] = correlate(*sides)
        least = first.get((budget, BASELINE), math.inf)
        ahead = [pair for pair in zip(*sides, strict=True) if pair[0] > least]
        if len(ahead) > 1:
            rows[AHEAD][f"{names[1]} {budget}"] = f"{correlate(*zip(*ahead, strict=True))} (n = {len(ahead)})"
    columns = ["method", *(f"{name} {budget}" for budget in budgets for name in names)]
    cells = [[row.get(column, "") for column in columns] for row in rows.values()]
    print(format_markdown([dict(zip(columns, row, strict=True)) for row in cells]))
    write_csv(options.csv, [columns, *cells])


def read_means(paths: Sequence[Path], metric: str) -> Means:
    """Return the means of a higher-is-better metric, without full caches and methods that lack a value."""
    means: Means = {}
    for row in (row for path in paths for row in read_csv(path)):
        mean = read_mean(row.get(f"{metric} ↑", ""))
        if mean is not None and "budget" in row and row["method"] != "full":
            means.setdefault((row["budget"], row["method"]), mean)
    return means


def correlate(first: Sequence[float], second: Sequence[float]) -> str:
    """Return Spearman's rank correlation of two lists as a string with two decimals."""
    return f"{spearmanr(first, second).statistic:.2f}"


def format_ranked(values: Sequence[float]) -> list[str]:
    """Return each value with its rank, 1 for the largest; equal values share the best rank.

    >>> format_ranked([3.0, 5.5, 3.0])
    ['3 (2)', '5.5 (1)', '3 (2)']
    """
    ranks = rankdata([-value for value in values], method="min")
    return [f"{value:g} ({rank:.0f})" for value, rank in zip(values, ranks, strict=True)]
