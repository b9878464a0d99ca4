"""Error and cost of `task=choose` over simulated races: how often the best method is dropped, and samples drawn.

Values are normal, or rows of a metric of finished runs that are drawn with replacement. Beside the race, paired t-tests
at 5 % after every block without a correction. `best dropped` counts races whose best method by the true mean left;
`drawn` is the share of the full grid's samples.

python -m benchmarks races [--races 1000] [--prompts 512] [--block 16]
python -m benchmarks races --runs runs/infinity_tiny --metric psnr
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.arguments import Option
from benchmarks.support.table import Table
from kvbench.choose.race import Race, Rules, advance
from kvbench.eval.protocol.compare import read_evaluator_results
from kvbench.eval.protocol.intervals import NORMAL_QUANTILE

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], dict[str, Floats]]
"""Returns values [prompts] by method."""
GAPS = {
    "all equal": (0.0,) * 20,
    "best ahead by 0.2": (0.2, *(0.0,) * 19),
    "spread": tuple(-0.15 * n for n in range(20)),
}
"""Means of the methods of each normal case, in standard deviations of a method's own noise."""
OPTIONS = {
    "races": Option(1000, "races of each case"),
    "prompts": 512,
    "block": Option(16, "prompts between two looks"),
    "runs": Option(
        "", "folder of a model's finished runs of the same prompts and budget, whose values are drawn"
    ),
    "metric": Option("psnr", "metric of these runs"),
}


def main(options: argparse.Namespace) -> None:
    """Print a row per case and rule."""
    cases = {name: _draw_normal(gaps) for name, gaps in GAPS.items()}
    if options.runs:
        cases = {options.runs: _draw_rows(read_values(Path(options.runs), options.metric))}
    table = Table({"best dropped": ".3f", "drawn": ".3f", "decided": ".3f"}, "values, rule", 48)
    for name, draw in cases.items():
        for rule, hold in {"sequence": hold_race, "repeated t-tests": hold_tests}.items():
            rng = np.random.default_rng(0)
            ends = np.array([hold(draw(rng, options.prompts), options.block) for _ in range(options.races)])
            table.add(f"{name}, {rule}", *ends.mean(0))


def _draw_normal(gaps: tuple[float, ...]) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> dict[str, Floats]:
        shared = rng.normal(0, 2, count)
        return {f"m{n}": gap + shared + rng.normal(0, 1, count) for n, gap in enumerate(gaps)}

    return draw


def _draw_rows(values: Mapping[str, Floats]) -> Draw:
    """Return a drawing of rows; the first method is the one with the best mean."""
    order = sorted(values, key=lambda method: -float(values[method].mean()))
    total = len(values[order[0]])

    def draw(rng: np.random.Generator, count: int) -> dict[str, Floats]:
        rows = rng.integers(0, total, count)
        return {method: values[method][rows] for method in order}

    return draw


def read_values(folder: Path, metric: str) -> dict[str, Floats]:
    """Return a metric's values by method of the finished runs of a folder, with their sign turned if less is better.

    Raises:
        ValueError: fewer than two runs have the metric for the same prompts.
    """
    values: dict[str, Floats] = {}
    for path in sorted(folder.glob("*/metrics/*.json")):
        results = read_evaluator_results(path)
        found = [row.get(metric) for _, row in sorted(results.rows.items())]
        if metric in results.scores and found and all(value is not None for value in found):
            sign = 1 if results.scores[metric][1].better == "higher" else -1
            values[path.parents[1].name] = sign * np.array(found, np.float64)
    if len(values) < 2 or len({len(one) for one in values.values()}) > 1:
        raise ValueError(f"--runs {folder}: needs two or more runs with {metric} on the same prompts")
    return values


def hold_race(values: dict[str, Floats], block: int) -> tuple[bool, float, bool]:
    """Return whether the first method left a race, the share that it drew, and whether one method was left."""
    total = len(next(iter(values.values())))
    race, count = Race.start(list(values), Rules()), 0
    while race.state == "racing" and count < total:
        count = min(count + block, total)
        race = advance(race, {method: values[method][:count] for method in race.racing})
    drawn = sum(one.after for one in race.exits) + count * len(race.racing)
    return next(iter(values)) not in race.racing, drawn / (total * len(values)), race.state == "won"


def hold_tests(values: dict[str, Floats], block: int) -> tuple[bool, float, bool]:
    """Return the same for paired t-tests at 5 % after every block."""
    left, drawn, total = list(values), 0, len(next(iter(values.values())))
    for count in range(block, total + block, block):
        drawn += len(left) * (min(count, total) - (count - block))
        means = {method: values[method][:count].mean() for method in left}
        best = max(left, key=means.__getitem__)

        def is_behind(method: str, best: str = best, count: int = count) -> bool:
            lead = (values[best] - values[method])[:count]
            return bool(lead.mean() > NORMAL_QUANTILE * lead.std(ddof=1) / len(lead) ** 0.5)

        left = [method for method in left if method == best or not is_behind(method)]
        if len(left) == 1:
            break
    return next(iter(values)) not in left, drawn / (total * len(values)), len(left) == 1
