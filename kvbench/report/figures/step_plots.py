"""Plots of cached tokens by step: slot utilisation and log-sum-exp (Hard-KV, Figures 9, 19 and 20)."""

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from kvbench.engine.ledger import Step
from kvbench.report.figures.method_styles import choose_styles
from kvbench.report.figures.styles import strip_frame
from kvbench.report.runs_table import name_methods
from kvbench.runs.record.results import Results


class Curve(NamedTuple):
    """One series of a figure over the steps of a generation.

    Attributes:
        across: label and value of the x axis.
        up: label and value of the y axis; a step may have no value.
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
"""Curves by the name of a table's `figure`."""
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
    """Draw the figure `kind` of `CURVES` with a line or points for each run; every run has recorded its steps."""
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
