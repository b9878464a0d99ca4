"""Plots: metrics against measured memory (HeatKV Figure 5 has budgets there), stability of head rankings (Figure 6)."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from kvbench.eval.protocol.scores import Metric
from kvbench.report.figures.method_styles import COLOURS, Style, choose_styles
from kvbench.report.figures.styles import strip_frame
from kvbench.report.memory import uses_bytes
from kvbench.report.runs_table import find_metric, list_metrics, name_methods
from kvbench.runs.record.results import Results

ABREAST = 4
"""Panels beside each other, at most."""
LETTERS, SIGN = 45, 7
"""Letters of the legend that have room under a panel, and how many its sign of a line takes."""


class Point(NamedTuple):
    """A metric of n samples at the most memory held, a share of the full cache, with the ends of its 95 % interval."""

    memory: float
    value: float
    low: float
    high: float
    n: int


TICKS = (0.001, 0.002, 0.004, 0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0)
"""Shares of the full cache that an axis names."""
FULL = "full"
"""The method that is a line across, whose memory is no choice."""


def trace_curves(runs: Sequence[Results], name: str) -> dict[str, list[Point]]:
    """Return a metric's points of every method by ascending memory; runs without a value are left out.

    Settings in which runs of a method differ make several lines of it. Of several runs that are alike in them and in
    their budget the first with the most images counts. Memory is counted in tokens unless some run asks for bytes
    (`uses_bytes`); runs without these are then left out.
    """
    in_bytes = uses_bytes(runs)
    found: dict[str, dict[Hashable, Point]] = {}
    named = zip(name_methods(runs), runs, strict=True)
    for method, run in sorted(named, key=lambda pair: -pair[1].n):
        metric = find_metric(run, name)
        memory = run.memory.byte_peak if in_bytes else run.memory.peak
        if memory is not None and metric is not None and metric.value is not None:
            point = Point(memory, metric.value, *(metric.interval or (metric.value,) * 2), run.n)
            found.setdefault(method, {}).setdefault(run.memory.allowed, point)
    return {method: sorted(points.values()) for method, points in sorted(found.items())}


def choose_panels(runs: Sequence[Results]) -> dict[str, str]:
    """Return the label of the axis of every metric that differs and that some method has at two budgets."""
    chosen = {}
    for name in list_metrics(runs):
        lines = trace_curves(runs, name).values()
        values = {point.value for points in lines for point in points}
        if len(values) > 1 and any(len(points) > 1 for points in lines):
            metric = next(run.metrics[name] for run in runs if name in run.metrics)
            chosen[name] = _label_axis(name, metric)
    return chosen


def draw_metrics(runs: Sequence[Results], title: str) -> Figure | None:
    """Draw metrics against measured memory, a panel per metric and a line per method with its 95 % band.

    Args:
        runs: finished runs of one model.
        title: of the figure; the number of samples of the runs drawn is added.

    Returns:
        None if no metric differs and has a method with two budgets.
    """
    panels = choose_panels(runs)
    if not panels:
        return None
    curves = {name: trace_curves(runs, name) for name in panels}
    methods = sorted({method for lines in curves.values() for method in lines})
    styles = choose_styles(methods)
    columns = min(len(panels), ABREAST)
    rows = ceil(len(panels) / columns)
    abreast = max(1, min(6, len(methods), LETTERS * columns // (SIGN + max(map(len, methods)))))
    size = (4.2 * columns + 0.4, 3.3 * rows + 0.5 + 0.2 * ceil(len(methods) / abreast))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12))
    handles: dict[str, Line2D] = {}
    for place, (name, label) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        handles |= _draw_curves(axes, curves[name], styles)
        axes.set_xlabel(
            f"measured memory, peak % of the full cache{' in 16 bits' if uses_bytes(runs) else ''}"
        )
        axes.set_ylabel(label)
    drawn = {point.n for lines in curves.values() for points in lines.values() for point in points}
    figure.suptitle(f"{title}, n = {', '.join(map(str, sorted(drawn)))}", fontsize=11)
    ordered = sorted(handles)
    figure.legend(
        [handles[method] for method in ordered],
        ordered,
        loc="outside lower center",
        ncols=abreast,
        frameon=False,
    )
    return figure


def draw_stability(
    deviation: NDArray[np.float64], heads: int, first: int, title: str, worst: tuple[float, str] | None = None
) -> Figure:
    """Draw the mean deviation of head ranks by source scale, in ranks and as a share of the heads (HeatKV Figure 6).

    Args:
        deviation: [sources], in ranks.
        heads: L x H.
        first: number of the first source scale, counted from 1 as the paper does.
        title: of the figure.
        worst: published worst case in percent of the heads, drawn as a line, and what it is.
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
    share = axes.secondary_yaxis(
        "right", functions=(partial(np.multiply, 100 / heads), partial(np.multiply, heads / 100))
    )
    share.set_ylabel(f"percent of {heads} heads")
    strip_frame(axes)
    axes.spines["right"].set_visible(True)
    axes.set_title(title, fontsize=11)
    return figure


def _label_axis(name: str, metric: Metric) -> str:
    return f"{name}{', ' * bool(metric.unit)}{metric.unit} ({metric.better} is better)"


def _draw_curves(
    axes: Axes, curves: Mapping[str, Sequence[Point]], styles: Mapping[str, Style]
) -> dict[str, Line2D]:
    """Draw a line with its band per method; return the lines."""
    lines = {}
    for method, points in curves.items():
        colour, marker, dashes = styles[method]
        x, y, low, high, _ = np.array(points).T
        if method == FULL:
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
    """Make the axis logarithmic, with round numbers as ticks, or what was measured where there are not two of those."""
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if min(memory) / 1.1 <= tick <= max(memory) * 1.1]
    axes.xaxis.set_major_locator(
        FixedLocator(ticks if len(ticks) > 1 else sorted({min(memory), max(memory)}))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    strip_frame(axes)
