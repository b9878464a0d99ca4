"""Error and cost of `task=choose` over simulated races: how often the best method is dropped, and samples drawn.

Values are normal, or rows of a metric of finished runs, sampled with replacement: one case for each budget of the
runs, and one without the best run. In cases of rare failures all other methods are ahead in most prompts and far
behind in a few. With `--span`, the largest difference of two methods, races have intervals that assume no distribution.

`best dropped` is the share of races that dropped the method with the best true mean, with its 95 % interval; of several
best methods, the first counts, even if another won. `drawn` is the share of the full grid's samples, `decided` the
share of races with one method left. The last columns have these shares for paired t-tests at 5 % after every block,
without a correction.

python -m benchmarks races [--races 1000] [--prompts 512] [--block 16]
python -m benchmarks races --runs runs/infinity_tiny runs/reasoner_tiny --metric psnr exact_answer [--csv FILE]
python -m benchmarks races --span 100
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.arguments import Option
from benchmarks.support.table import Table, write_csv
from kvbench.eval.protocol.compare import read_evaluator_results
from kvbench.eval.protocol.intervals import find_quantile, wilson_interval
from kvbench.eval.protocol.ranges import Range
from kvbench.extras.race.rules import Race, Rules, advance
from kvbench.extras.race.values import IDENTICAL, find_limits

Floats = NDArray[np.float64]
Values = Mapping[str, Floats]
Draw = Callable[[np.random.Generator, int], Values]
"""Sampler of values [prompts] by method, best method first."""
Hold = Callable[[Values, int, Range | None], tuple[bool, float, bool]]
"""Function that runs a race: whether it dropped the first method, share of samples drawn, whether one was left."""
Case = tuple[int, Draw, Range | None, int | None]
"""Number of methods, their values, limits of bounded values, and prompts between looks; None for the option's."""
GAPS = {
    "normal, all equal": (0.0,) * 20,
    "normal, best ahead by 0.2": (0.2, *(0.0,) * 19),
    "normal, 0.15 apart": tuple(-0.15 * n for n in range(20)),
}
"""Means of the methods of each normal case, in standard deviations of a method's own noise."""
FAILING = ((1, 16), (1, 64), (1, 100), (19, 16), (19, 64), (19, 200))
"""Methods that fail and prompts between two looks in each case of rare failures."""
OPTIONS = {
    "races": Option(1000, "races of each case"),
    "prompts": 512,
    "block": Option(16, "prompts between two looks"),
    "runs": Option(
        [], "folders of a model's finished runs of the same prompts, whose values are sampled", type=str
    ),
    "metric": Option(["psnr"], "metrics of these runs, one for all folders or one per folder"),
    "span": Option(0.0, "largest difference of two methods, for intervals of bounded values"),
    "csv": Option("", "file for the table"),
}
COLUMNS = (
    "values", "methods", "best dropped", "drawn", "decided", "dropped by t-tests", "drawn by t-tests",
    "decided by t-tests",
)  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print a row of error rates and savings for each case."""
    cases: dict[str, Case] = {name: (len(gaps), draw_normal(gaps), None, None) for name, gaps in GAPS.items()}
    for others, block in FAILING:
        name = f"rare failures of {others}, a look every {block}"
        cases[name] = others + 1, draw_failing(others), None, block
    metrics = options.metric if len(options.metric) > 1 else options.metric * len(options.runs)
    for folder, metric in zip(options.runs, metrics, strict=True):
        for budget, values in read_values(Path(folder), metric).items():
            limits = find_limits(metric, np.concatenate(list(values.values())))
            order = sorted(values, key=lambda run, values=values: -float(values[run].mean()))
            name = f"{metric} of {Path(folder).name} at {budget}"
            for more, kept in (("", order), (", without the best", order[1:])):
                if len(kept) > 1:
                    cases[f"{name}{more}"] = len(kept), draw_rows(values, kept), limits, None
    table, rows = Table({f"{name:>20}": "" for name in COLUMNS[1:]}, COLUMNS[0], 56), [COLUMNS]
    for name, (methods, draw, own_limits, block) in cases.items():
        cells, limits = [str(methods)], (0.0, options.span) if options.span else own_limits
        for hold in (hold_race, hold_tests):
            rng = np.random.default_rng(0)
            ends = [
                hold(draw(rng, options.prompts), block or options.block, limits) for _ in range(options.races)
            ]
            dropped, drawn, decided = (float(mean) for mean in np.mean(ends, 0))
            found = wilson_interval(dropped, len(ends))
            cells += [f"{dropped:.3f} [{found.low:.3f}, {found.high:.3f}]", f"{drawn:.3f}", f"{decided:.3f}"]
        table.add(name, *cells)
        rows.append((name, *cells))
    write_csv(options.csv, rows)


def draw_normal(gaps: tuple[float, ...]) -> Draw:
    """Return a sampler of normal values with these means, which share most of their variance."""

    def draw(rng: np.random.Generator, count: int) -> Values:
        shared = rng.normal(0, 2, count)
        return {f"m{n}": gap + shared + rng.normal(0, 1, count) for n, gap in enumerate(gaps)}

    return draw


def draw_failing(others: int) -> Draw:
    """Return a sampler of one best method and rivals that lead it by 1 dB but fall 50 dB behind in 3 % of prompts."""

    def draw(rng: np.random.Generator, count: int) -> Values:
        shared = rng.normal(50, 2, count)
        leads = np.where(rng.random((others, count)) < 0.03, -50.0, 1.0)
        noise = rng.normal(0, 0.2, (others + 1, count))
        return {"best": shared + noise[0]} | {
            f"m{n}": shared + lead + own for n, (lead, own) in enumerate(zip(leads, noise[1:], strict=True))
        }

    return draw


def draw_rows(values: Values, order: Sequence[str]) -> Draw:
    """Return a sampler of prompts, with replacement, by the rows of their values for these methods."""
    total = len(values[order[0]])

    def draw(rng: np.random.Generator, count: int) -> Values:
        rows = rng.integers(0, total, count)
        return {method: values[method][rows] for method in order}

    return draw


def read_values(folder: Path, metric: str) -> dict[str, dict[str, Floats]]:
    """Return a metric's values by budget and by run of the finished runs of a folder, larger being better.

    The full cache's run is left out. A PSNR without a value, of equal images, is `IDENTICAL`.

    Raises:
        ValueError: no budget has two runs, or runs of one budget differ in prompts.
    """
    found: dict[str, dict[str, Floats]] = defaultdict(dict)
    prompts: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("*/metrics/*.json")):
        if not (finished := path.parents[1] / "results.json").is_file():
            continue
        run = json.loads(finished.read_text(encoding="utf-8"))
        results = read_evaluator_results(path)
        rows = [row.get(metric) for _, row in sorted(results.rows.items())]
        if metric == "psnr":
            rows = [IDENTICAL if value is None else min(value, IDENTICAL) for value in rows]
        if metric in results.scores and run["reference"] is not None and rows and None not in rows:
            sign = 1 if results.scores[metric][1].better == "higher" else -1
            budget = str(run["config"]["budget"])
            found[budget][run["run"]] = sign * np.array(rows, np.float64)
            prompts[budget].add(json.dumps((run["config"]["prompts"], sorted(results.rows)), sort_keys=True))
    found = {budget: values for budget, values in found.items() if len(values) > 1}
    if not found or any(len(prompts[budget]) > 1 for budget in found):
        raise ValueError(f"--runs {folder}: needs two or more runs at one budget with {metric}, same prompts")
    return found


def hold_race(values: Values, block: int, limits: Range | None = None) -> tuple[bool, float, bool]:
    """Run a race of `task=choose`; return as `Hold` says."""
    total = len(next(iter(values.values())))
    race, count = Race.start(list(values), Rules(limits=limits)), 0
    while race.state == "racing" and count < total:
        count = min(count + block, total)
        race = advance(race, {method: values[method][:count] for method in race.racing})
    drawn = sum(leaving.after for leaving in race.exits) + count * len(race.racing)
    return next(iter(values)) not in race.racing, drawn / (total * len(values)), race.state == "won"


def hold_tests(values: Values, block: int, _: Range | None = None) -> tuple[bool, float, bool]:
    """Drop methods by paired t-tests at 5 % against the leader after every block; return as `Hold` says."""
    table = np.stack(list(values.values()))
    left, drawn, total = np.arange(len(table)), 0, table.shape[1]
    for start in range(0, total, block):
        seen = table[left, : start + block]
        drawn += len(left) * (seen.shape[1] - start)
        leads = seen[seen.mean(1).argmax()] - seen
        reach = find_quantile(seen.shape[1]) * leads.std(1, ddof=1) / seen.shape[1] ** 0.5
        left = left[leads.mean(1) <= reach]
        if len(left) == 1:
            break
    return 0 not in left, drawn / table.size, len(left) == 1
