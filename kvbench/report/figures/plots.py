"""Plots of metrics against measured memory and of the stability of head rankings (HeatKV Figures 5 and 6)."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from kvbench.report.figures.method_styles import COLOURS, Style, choose_styles
from kvbench.report.figures.styles import strip_frame
from kvbench.report.memory import uses_bytes
from kvbench.report.runs_table import SEED_COLUMNS, choose_metrics, find_metric, name_methods
from kvbench.runs.record.results import Results

PANELS_PER_ROW = 4
"""Maximum number of panels in a row."""
MAX_LINES = 8
"""Maximum number of methods that a figure draws in colour."""
OTHERS_GREY = "0.85"
"""Grey in which the other methods are drawn."""
PANEL_LETTERS, LINE_LETTERS = 45, 7
"""Widths in characters: of the legend under a panel, and of a line sample."""


class Point(NamedTuple):
    """Value of a metric at a peak memory (share of the full cache), with the ends of its 95 % interval."""

    memory: float
    value: float
    low: float
    high: float


TICKS = (0.001, 0.002, 0.004, 0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0)
"""Ticks of the memory axis, in shares of the full cache."""
FULL = "full"
"""Method that is drawn as a horizontal line: the full cache."""


def trace_curves(runs: Sequence[Results], name: str) -> dict[str, list[Point]]:
    """Return a metric's points of each method by ascending memory; runs without a value are left out.

    A method has a line for each set of settings, and of seeds, in which its runs differ; runs that `combine_seeds`
    joined are one point at their mean. Of several runs with the same settings and budget, the first one counts. Memory
    is counted in tokens unless some run needs bytes (`uses_bytes`). `runs` share `find_conditions`, since values of
    different samples are not points of one line.
    """
    in_bytes = uses_bytes(runs)
    curves: dict[str, dict[Hashable, Point]] = {}
    # `name_methods` compares settings within one budget; with equal memories it compares them within all.
    names = name_methods([replace(run, memory=runs[0].memory) for run in runs])
    for method, run in zip(names, runs, strict=True):
        metric = find_metric(run, name)
        memory = run.memory.byte_peak if in_bytes else run.memory.peak
        if metric is not None and metric.value is not None:
            point = Point(memory, metric.value, *(metric.interval or (metric.value,) * 2))
            curves.setdefault(method, {}).setdefault(run.memory.allowed, point)
    return {method: sorted(points.values()) for method, points in sorted(curves.items())}


def choose_panels(runs: Sequence[Results], names: Sequence[str] | None = ()) -> dict[str, str]:
    """Return the axis labels of the metrics that differ and that some method has at two budgets.

    `names` are the metrics to choose from, see `choose_metrics`.
    """
    labels = {}
    for name in choose_metrics(runs, names):
        lines = trace_curves(runs, name).values()
        values = {point.value for points in lines for point in points}
        if len(values) > 1 and any(len(points) > 1 for points in lines):
            metric = next(run.metrics[name] for run in runs if name in run.metrics)
            labels[name] = f"{name}{', ' * bool(metric.unit)}{metric.unit} ({metric.better} is better)"
    return labels


def split_methods(methods: Sequence[str]) -> Iterator[tuple[dict[str, Style], str]]:
    """Yield the methods of each figure with their styles, nearly equally many in each, and the end of its title."""
    styles, count = choose_styles(methods), ceil(len(methods) / MAX_LINES)
    ends = [round(len(methods) * index / count) for index in range(count + 1)]
    for index, (start, stop) in enumerate(pairwise(ends), 1):
        part = f" ({index} of {count})" if count > 1 else ""
        yield {method: styles[method] for method in methods[start:stop]}, part


def draw_metrics(runs: Sequence[Results], title: str, names: Sequence[str] | None = ()) -> list[Figure]:
    """Draw the metrics of `choose_panels` against measured memory: a panel each, a line with 95 % band per method.

    Of more than `MAX_LINES` methods, each figure draws some in colour and the others in grey behind them. Without
    panels there are no figures.
    """
    panels = choose_panels(runs, names)
    curves = {name: trace_curves(runs, name) for name in panels}
    methods = sorted({method for lines in curves.values() for method in lines})
    return [
        draw_panels(panels, curves, styles, title + part, in_bytes=uses_bytes(runs))
        for styles, part in (split_methods(methods) if panels else ())
    ]


def draw_panels(
    panels: Mapping[str, str],
    curves: Mapping[str, Mapping[str, Sequence[Point]]],
    styles: Mapping[str, Style],
    title: str,
    *,
    in_bytes: bool,
) -> Figure:
    """Draw the methods of `styles` in a panel for each metric, and all other methods in grey.

    `panels` has the axis label of each metric, and `curves` the points by metric and method. Memory is a share of the
    full cache's bytes if `in_bytes`, otherwise of its tokens.
    """
    columns = min(len(panels), PANELS_PER_ROW)
    rows = ceil(len(panels) / columns)
    longest = max(map(len, styles))
    abreast = max(1, min(6, len(styles), PANEL_LETTERS * columns // (LINE_LETTERS + longest)))
    size = (4.2 * columns + 0.4, 3.3 * rows + 0.5 + 0.2 * ceil(len(styles) / abreast))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12))
    handles: dict[str, Line2D] = {}
    for index, (name, label) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, index)
        handles |= _draw_curves(axes, curves[name], styles)
        axes.set_xlabel(f"measured memory, peak % of the full cache{' in 16 bits' * in_bytes}")
        axes.set_ylabel(label)
    figure.suptitle(title, fontsize=11)
    ordered = sorted(handles)
    lines = [handles[method] for method in ordered]
    figure.legend(lines, ordered, loc="outside lower center", ncols=abreast, frameon=False)
    return figure


def draw_stability(
    deviation: NDArray[np.float64], heads: int, first: int, title: str, worst: tuple[float, str] | None = None
) -> Figure:
    """Draw the mean deviation of head ranks by source scale, in ranks and as a share of the heads (HeatKV Figure 6).

    `deviation` is float64 [sources], in ranks of `heads` = L x H; `first` is the first source scale, counted from 1 as
    in the paper. `worst` is the published worst case in % of the heads, drawn as a line, and its label.
    """
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    scales = np.arange(first, first + len(deviation))
    axes.bar(scales, deviation, width=0.65, color=COLOURS[0])
    axes.set_xticks(scales)
    axes.set_xlabel("source scale (from 1)")
    axes.set_ylabel("deviation of a head's rank, in ranks")
    heights = [float(deviation.max())]
    if worst is not None:
        heights.append(worst[0] * heads / 100)
        axes.axhline(heights[1], color=COLOURS[1], linewidth=1.5, linestyle="--", label=worst[1])
        figure.legend(loc="outside lower center", frameon=False)
    axes.set_ylim(0, 1.1 * max(heights) if max(heights) > 0 else 1)
    to_percent, to_ranks = partial(np.multiply, 100 / heads), partial(np.multiply, heads / 100)
    share = axes.secondary_yaxis("right", functions=(to_percent, to_ranks))
    share.set_ylabel(f"percent of {heads} heads")
    strip_frame(axes)
    axes.spines["right"].set_visible(True)
    axes.set_title(title, fontsize=11)
    return figure


def _draw_curves(
    axes: Axes, curves: Mapping[str, Sequence[Point]], styles: Mapping[str, Style]
) -> dict[str, Line2D]:
    """Draw a line with a band for each method of `styles`, and grey lines for others; return the former by method."""
    lines = {}
    for method, points in curves.items():
        x, y, low, high = np.array(points).T
        if method not in styles:
            axes.plot(x, y, color=OTHERS_GREY, linewidth=1, zorder=1)
            continue
        colour, marker, dashes = styles[method]
        if method == FULL or method.startswith(f"{FULL} {SEED_COLUMNS[0]}"):
            lines[method] = axes.axhline(y[0], color=colour, linestyle="--", linewidth=1)
            continue
        [lines[method]] = axes.plot(
            x, y, color=colour, marker=marker, linestyle=dashes, markersize=5, linewidth=1.5
        )
        if len(points) > 1:
            axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
        else:
            axes.vlines(x, low, high, color=colour, linewidth=1.5)
    memory = [point.memory for method, points in curves.items() for point in points if method != FULL]
    _set_memory_axis(axes, memory)
    return lines


def _set_memory_axis(axes: Axes, memory: Sequence[float]) -> None:
    """Make the axis logarithmic with `TICKS`, or with the smallest and largest value if fewer than two ticks fit."""
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if min(memory) / 1.1 <= tick <= max(memory) * 1.1]
    ends = sorted({min(memory), max(memory)})
    axes.xaxis.set_major_locator(FixedLocator(ticks if len(ticks) > 1 else ends))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    strip_frame(axes)
