"""Plots of lines over positions, batch sizes and steps.

They show divergence from the full cache with 95 % bands, the times of `task=profile`, and slot utilisation and
log-sum-exp over steps (Hard-KV, Figures 9, 19 and 20).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_bytes
from kvbench.engine.ledger import Step
from kvbench.eval.text.drift import Band, DivergenceCurve
from kvbench.report.figures.method_styles import Style, choose_styles
from kvbench.report.figures.plots import OTHERS_GREY, split_methods
from kvbench.report.figures.styles import strip_frame
from kvbench.report.runs_table import name_methods
from kvbench.report.timings import name_device
from kvbench.runs.record.results import Results

PANELS: Mapping[str, str] = {"kl": "KL(full || method), nats ↓", "same_top1": "same likeliest token ↑"}
"""Rows of panels: axis labels by field of `DivergenceCurve`; an arrow points to better values."""
LEGEND_LETTERS = 45
"""Characters of the legend that fit under a panel."""

ByBudget = Mapping[str, Mapping[str, DivergenceCurve]]
"""Curves of divergence by budget and method."""


def draw_drifts(drifts: ByBudget, title: str) -> list[Figure]:
    """Draw a column of panels for each budget, with a line for each method.

    Of more than `plots.MAX_LINES` methods, each figure draws some in colour and the others in grey behind them.
    """
    methods = sorted({method for curves in drifts.values() for method in curves})
    return [_draw_budgets(drifts, styles, title + part) for styles, part in split_methods(methods)]


def _draw_budgets(drifts: ByBudget, styles: Mapping[str, Style], title: str) -> Figure:
    width = max(4.2 * len(drifts), 5.6)
    abreast = max(1, int(width / 4.2 * LEGEND_LETTERS) // (7 + max(map(len, styles))))
    rows = -(-len(styles) // abreast)
    figure = Figure(figsize=(width + 0.4, 5.6 + 0.2 * rows), layout="constrained")
    grid = figure.subplots(len(PANELS), len(drifts), sharex=True, sharey="row", squeeze=False)
    handles: dict[str, Line2D] = {}
    unit = next(drift.unit for curves in drifts.values() for drift in curves.values())
    for row, (field, label) in enumerate(PANELS.items()):
        grid[row][0].set_ylabel(label, fontsize=9)
        for axes, (budget, curves) in zip(grid[row], drifts.items(), strict=True):
            handles |= _draw_panel(axes, curves, field, styles)
            if row == 0:
                axes.set_title(f"budget {budget}", fontsize=10)
    positions = "scored tokens so far" if unit == "tokens" else f"{unit} of the image"
    for axes in grid[-1]:
        axes.set_xlabel(positions, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    grid[0][0].set_ylim(bottom=0)
    figure.suptitle(title, fontsize=11)
    ordered = sorted(handles)
    lines = [handles[name] for name in ordered]
    figure.legend(lines, ordered, loc="outside lower center", ncols=abreast, frameon=False, fontsize=9)
    return figure


def find_centres(drift: DivergenceCurve) -> list[float]:
    """Return the x coordinate of each bin: its middle token, or its index from 1 for rows and scales."""
    if drift.unit == "tokens":
        return [(start + stop) / 2 for start, stop in pairwise(drift.edges)]
    return [float(index) for index in range(1, len(drift.edges))]


def _draw_panel(
    axes: Axes, drifts: Mapping[str, DivergenceCurve], field: str, styles: Mapping[str, Style]
) -> dict[str, Line2D]:
    lines = {}
    for method, drift in drifts.items():
        x = find_centres(drift)
        bands: Sequence[Band] = getattr(drift, field)
        mean, low, high = np.array(bands, np.float64).T
        if method not in styles:
            axes.plot(x, mean, color=OTHERS_GREY, linewidth=1, zorder=1)
            continue
        colour, marker, dashes = styles[method]
        [lines[method]] = axes.plot(
            x, mean, color=colour, marker=marker, linestyle=dashes, markersize=3.5, linewidth=1.4
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    strip_frame(axes)
    return lines


QUANTILES = ("median", "p10", "p90")
"""Quantiles of a batch's seconds that a profile has."""
Latencies = list[tuple[float, ...]]
"""Number of prompts and `QUANTILES` of each batch, the batch sizes ascending."""


def read_profiles(runs_dir: Path) -> dict[str, dict[str, Latencies]]:
    """Return the profiles in a folder of runs, by model, device and dtype of the cache, then by method and budget.

    Of profiles that agree in all of these, the newest one counts.

    Raises:
        ConfigError: a profile is damaged.
    """
    profiles: dict[str, dict[str, Latencies]] = {}
    for path in sorted((runs_dir / "profile").glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            values = parse_json(read_bytes(path))
            if values["status"] != "done":
                continue
            device, rows = name_device(values), [row for row in values["rows"] if row["status"] == "ok"]
            group = ", ".join(filter(None, (values["model"], device, values.get("cache_dtype"))))
            curves = profiles.setdefault(group, {})
            for name in dict.fromkeys(row["cache"] for row in rows):
                budget = values["budget"]
                unit = " bytes" if budget.get("unit") == "bytes" else ""
                share = "" if name == "full" else f", {100 * float(budget['fraction']):.3g} %{unit}"
                curves[f"{name}{share}"] = sorted(
                    (int(row["batch"]), *(float(row["latency"][key]) for key in QUANTILES))
                    for row in rows
                    if row["cache"] == name
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: damaged ({type(error).__name__} {error}); delete it") from None
    return {group: curves for group, curves in profiles.items() if curves}


def draw_latencies(curves: Mapping[str, Latencies], title: str) -> Figure:
    """Draw seconds per prompt by batch size on logarithmic axes, with bands from the 10th to 90th percentile."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    styles = choose_styles(list(curves))
    for name, rows in sorted(curves.items()):
        colour, marker, dashes = styles[name]
        batch, *seconds = np.array(rows).T
        median, low, high = (part / batch for part in seconds)
        [line] = axes.plot(batch, median, color=colour, marker=marker, linestyle=dashes, label=name)
        line.set(markersize=5, linewidth=1.5)
        axes.fill_between(batch, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row[0] for rows in curves.values() for row in rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_xlabel("prompts per batch")
    axes.set_ylabel("seconds per prompt (lower is better)")
    strip_frame(axes)
    figure.legend(loc="outside lower center", frameon=False, ncols=2)
    figure.suptitle(title, fontsize=10)
    return figure


class Curve(NamedTuple):
    """Axes of a figure over the steps of a generation.

    Attributes:
        across: label of the x axis, and the function of a step's value.
        up: label of the y axis, and the function of a step's value, which may be None.
        fitted: draw single points and a line fitted to all of them over log x; the prompt's step is left out.
    """

    across: tuple[str, Callable[[Step], float]]
    up: tuple[str, Callable[[Step], float | None]]
    fitted: bool = False


TOKENS_SO_FAR = ("tokens so far", lambda step: step.tokens)
CURVES: Mapping[str, Curve] = {
    "utilisation": Curve(TOKENS_SO_FAR, ("slot utilisation, %", lambda step: 100 * step.held / step.longest)),
    "density": Curve(
        ("tokens kept, mean over heads", lambda step: step.held),
        ("log-sum-exp over kept tokens, nats", lambda step: step.kept_lse),
        fitted=True,
    ),
    "lse": Curve(TOKENS_SO_FAR, ("log-sum-exp over held tokens, nats", lambda step: step.lse)),
}
"""Curves by the name that a published table has as its `figure`."""
Points = list[tuple[float, float]]


def list_points(steps: Sequence[Step], curve: Curve) -> Points:
    """Return the points of a run in order, without steps that have no value."""
    pairs = [(curve.across[1](step), curve.up[1](step)) for step in steps[int(curve.fitted) :]]
    return [(x, y) for x, y in pairs if y is not None]


def fit_line(points: Points) -> tuple[float, float, float]:
    """Fit y = offset + slope ln x by least squares; return slope, offset and the correlation of y and ln x."""
    x, y = np.array([(log(x), y) for x, y in points]).T
    slope, offset = np.polyfit(x, y, 1)
    return float(slope), float(offset), float(np.corrcoef(x, y)[0, 1])


def name_runs(runs: Sequence[Results]) -> list[str]:
    """Return a label for each run: method, settings, and the budget if there are several."""
    names, budgets = name_methods(runs), {run.memory.allowed for run in runs}
    if len(budgets) < 2:
        return names
    units = {run.memory.budget_unit for run in runs}
    return [
        f"{name}, {100 * run.memory.budget:.3g} %"
        + (f" of {run.memory.budget_unit}" if len(units) > 1 else "")
        for name, run in zip(names, runs, strict=True)
    ]


def draw_steps(runs: Sequence[Results], kind: str, title: str) -> Figure:
    """Draw the figure `kind` of `CURVES` with a line or points for each run; all runs have recorded steps."""
    curve, whole = CURVES[kind], Points()
    figure = Figure(figsize=(6.4, 4.2 + 0.1 * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    names = name_runs(runs)
    styles = choose_styles(names)
    for name, run in zip(names, runs, strict=True):
        points = list_points(run.steps, curve)
        whole += points
        colour, marker, dashes = styles[name]
        x, y = [x for x, _ in points], [y for _, y in points]
        dashes = "none" if curve.fitted else dashes
        axes.plot(x, y, color=colour, marker=marker, linestyle=dashes, markersize=4, label=name)
    if curve.fitted and len({x for x, _ in whole}) > 1:
        slope, offset, correlation = fit_line(whole)
        ends = [log(min(x for x, _ in whole)), log(max(x for x, _ in whole))]
        label = f"{offset:.2f} + {slope:.2f} ln x, r = {correlation:.3f}"
        axes.plot([exp(x) for x in ends], [offset + slope * x for x in ends], color="0.4", label=label)
        axes.set_xscale("log")
    axes.set_xlabel(curve.across[0])
    axes.set_ylabel(curve.up[0])
    strip_frame(axes)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
