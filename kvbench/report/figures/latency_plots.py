"""Plots of time against batch size, from the results of `task=profile`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_bytes
from kvbench.report.figures.method_styles import choose_styles
from kvbench.report.figures.styles import strip_frame


class Timing(NamedTuple):
    """Number of prompts of a batch, and the median, 10th and 90th percentile of its seconds."""

    batch: int
    median: float
    low: float
    high: float


Curves = Mapping[str, Sequence[Timing]]
"""By method and budget, ascending."""


def read_profiles(runs_dir: Path) -> dict[str, dict[str, list[Timing]]]:
    """Return the profiles in a folder of runs, by model, device and dtype of the cache, then by method and budget.

    The newest profile of these counts.

    Raises:
        ConfigError: a profile is damaged.
    """
    profiles: dict[str, dict[str, list[Timing]]] = {}
    for path in sorted((runs_dir / "profile").glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            values = parse_json(read_bytes(path))
            if values["status"] != "done":
                continue
            machine, rows = values["provenance"], [row for row in values["rows"] if row["status"] == "ok"]
            device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
            place = ", ".join(filter(None, (values["model"], device, values.get("cache_dtype"))))
            curves = profiles.setdefault(place, {})
            for name in dict.fromkeys(row["cache"] for row in rows):
                share = "" if name == "full" else f", {_name_budget(values['budget'])}"
                curves[f"{name}{share}"] = sorted(_read_timing(row) for row in rows if row["cache"] == name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: damaged ({type(error).__name__} {error}); delete it") from None
    return {place: curves for place, curves in profiles.items() if curves}


def _name_budget(budget: Mapping[str, object]) -> str:
    """Return a profile's budget as a percentage of the full cache or of its bytes."""
    unit = " bytes" if budget.get("unit") == "bytes" else ""
    return f"{100 * float(str(budget['fraction'])):.3g} %{unit}"


def _read_timing(row: Mapping[str, object]) -> Timing:
    latency = row["latency"]
    if not isinstance(latency, Mapping):
        raise TypeError("latency is no object")
    return Timing(int(str(row["batch"])), *(float(latency[name]) for name in ("median", "p10", "p90")))


def draw_latencies(curves: Curves, title: str) -> Figure:
    """Draw seconds per image by batch size on logarithmic axes, with bands from the 10th to 90th percentile."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    styles = choose_styles(list(curves))
    for name, timings in sorted(curves.items()):
        colour, marker, dashes = styles[name]
        batch, *seconds = np.array(timings).T
        median, low, high = (part / batch for part in seconds)
        [line] = axes.plot(batch, median, color=colour, marker=marker, linestyle=dashes, label=name)
        line.set(markersize=5, linewidth=1.5)
        axes.fill_between(batch, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({timing.batch for timings in curves.values() for timing in timings})
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_xlabel("prompts per batch")
    axes.set_ylabel("seconds per image (lower is better)")
    strip_frame(axes)
    figure.legend(loc="outside lower center", frameon=False, ncols=2)
    figure.suptitle(title, fontsize=10)
    return figure
