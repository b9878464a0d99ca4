"""Maps of the share of each source that each head keeps (as in HeatKV, Figure 4)."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvbench.runs.generate.retention import Retention

PANELS_PER_ROW = 4
"""Maximum number of maps in a row."""
MAX_MAPS = 12
"""Maximum number of maps of a figure; more sources are joined with their neighbours."""
SIDE, WIDE, HEADER, GAP = 1.55, 1.4, 0.35, 0.06
"""Distance of maps, width of a map, height of its title, and gap between a map and its labels, in inches."""
COLOUR_MAP = "cividis"
"""From dark (evicted) to light (kept); readable in grey and with any colour vision."""


def join_sources(retention: Retention, max_sources: int) -> tuple[list[str], NDArray[np.float64]]:
    """Return labels and kept shares, float64 [L, H, labels], of at most `max_sources` sources.

    Neighbours are joined, weighted by their tokens; a prompt is never joined.
    """
    kept, tokens = np.array(retention.kept, np.float64), np.array(retention.tokens, np.float64)
    apart = int(retention.sources[0] == "prompt")
    width = max(1, ceil((len(tokens) - apart) / (max_sources - apart)))
    starts = [*range(apart), *range(apart, len(tokens), width)]
    labels, shares = [], []
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        names = retention.sources[start:stop]
        labels.append(names[0] if len(names) == 1 else f"{names[0]} to {names[-1].removeprefix('row ')}")
        shares.append(kept[:, :, start:stop] @ tokens[start:stop] / tokens[start:stop].sum())
    return labels, np.stack(shares, 2)


def average_maps(retentions: Sequence[Retention]) -> Retention:
    """Return the mean of maps of the same sources."""
    kept = np.mean([retention.kept for retention in retentions], axis=0)
    tokens = np.mean([retention.tokens for retention in retentions], axis=0)
    layers = tuple(tuple(tuple(head) for head in layer) for layer in kept.tolist())
    return replace(retentions[0], kept=layers, tokens=tuple(tokens.tolist()))


def draw_retention(retention: Retention, title: str) -> Figure:
    """Draw a map for each source with a square for each head: layers down, KV heads across.

    All maps share one coordinate system in inches, because laying out twelve systems takes seconds.
    """
    labels, shares = join_sources(retention, MAX_MAPS)
    layers, heads, count = shares.shape
    columns = min(PANELS_PER_ROW, count)
    rows = ceil(count / columns)
    high = SIDE * min(max(layers / heads, 0.6), 2.0)
    across, down = SIDE * columns, (high + HEADER) * rows
    figure = Figure(figsize=(across + 1.2, down + 0.8), layout="constrained")
    axes = figure.add_subplot()
    for index, label in enumerate(labels):
        row, column = divmod(index, columns)
        left, top = column * SIDE, row * (high + HEADER) + HEADER
        x, y = left + np.linspace(0, WIDE, heads + 1), top + np.linspace(0, high, layers + 1)
        shown = axes.imshow(
            shares[:, :, index], vmin=0, vmax=1, cmap=COLOUR_MAP, interpolation="nearest",
            extent=(x[0], x[-1], y[-1], y[0]),
        )  # fmt: skip
        axes.hlines(y[1:-1], x[0], x[-1], color="white", linewidth=0.4)
        axes.vlines(x[1:-1], y[0], y[-1], color="white", linewidth=0.4)
        axes.text(x.mean(), top - GAP, label, ha="center", va="bottom", fontsize=9)
        for layer in _choose_ticks(layers) if column == 0 else ():
            axes.text(-GAP, y[layer : layer + 2].mean(), str(layer), ha="right", va="center", fontsize=8)
        for head in _choose_ticks(heads) if index + columns >= count else ():
            axes.text(x[head : head + 2].mean(), y[-1] + GAP, str(head), ha="center", va="top", fontsize=8)
    axes.set(xlim=(0, across), ylim=(down, 0), aspect="auto")
    axes.set_axis_off()
    figure.supxlabel("KV head", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("share of the source's tokens kept", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _choose_ticks(count: int) -> Sequence[int]:
    """Return the indices of at most six rows or columns to label."""
    return range(0, count, max(1, ceil(count / 6)))
