"""Plots of the divergence from the full cache over the position in a text: a line with a 95 % band per method."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvbench.eval.text.drift import Band, Drift
from kvbench.report.figures.method_styles import Style
from kvbench.report.figures.plots import OTHERS, split_methods
from kvbench.report.figures.styles import strip_frame

PANELS: Mapping[str, str] = {"kl": "KL(full || method), nats ↓", "same_top1": "same likeliest token ↑"}
"""Rows of panels, by field of `Drift`, and the labels of their axes, with an arrow towards better values."""
LEGEND_LETTERS = 45
"""Letters of the legend that fit under a panel."""

ByBudget = Mapping[str, Mapping[str, Drift]]
"""Divergence by budget and method."""


def draw_drifts(drifts: ByBudget, title: str) -> list[Figure]:
    """Draw a column of panels for each budget, with a line for each method.

    Of more than `plots.MAX_LINES` methods, each figure draws some in colour and the others in grey behind them.

    Args:
        drifts: divergence by budget and method, all with the same edges.
        title: title of the figure.
    """
    methods = sorted({method for own in drifts.values() for method in own})
    return [_draw(drifts, styles, title + part) for styles, part in split_methods(methods)]


def _draw(drifts: ByBudget, styles: Mapping[str, Style], title: str) -> Figure:
    width = max(4.2 * len(drifts), 5.6)
    abreast = max(1, int(width / 4.2 * LEGEND_LETTERS) // (7 + max(map(len, styles))))
    rows = -(-len(styles) // abreast)
    figure = Figure(figsize=(width + 0.4, 5.6 + 0.2 * rows), layout="constrained")
    grid = figure.subplots(len(PANELS), len(drifts), sharex=True, sharey="row", squeeze=False)
    handles: dict[str, Line2D] = {}
    unit = next(drift.unit for own in drifts.values() for drift in own.values())
    for row, (field, label) in enumerate(PANELS.items()):
        grid[row][0].set_ylabel(label, fontsize=9)
        for axes, (budget, own) in zip(grid[row], drifts.items(), strict=True):
            handles |= _draw_panel(axes, own, field, styles)
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


def find_centres(drift: Drift) -> list[float]:
    """Return the place of each bin on the axis: its middle token, or its number from 1 for rows and scales."""
    if drift.unit == "tokens":
        return [(start + stop) / 2 for start, stop in pairwise(drift.edges)]
    return [float(number) for number in range(1, len(drift.edges))]


def _draw_panel(
    axes: Axes, drifts: Mapping[str, Drift], field: str, styles: Mapping[str, Style]
) -> dict[str, Line2D]:
    lines = {}
    for method, drift in drifts.items():
        x = find_centres(drift)
        bands: Sequence[Band] = getattr(drift, field)
        mean, low, high = np.array(bands, np.float64).T
        if method not in styles:
            axes.plot(x, mean, color=OTHERS, linewidth=1, zorder=1)
            continue
        colour, marker, dashes = styles[method]
        [lines[method]] = axes.plot(
            x, mean, color=colour, marker=marker, linestyle=dashes, markersize=3.5, linewidth=1.4
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    strip_frame(axes)
    return lines
