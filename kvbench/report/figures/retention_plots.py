"""Maps of the share of each source that each head keeps (as in HeatKV, Figure 4)."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvbench.runs.generate.retention import Retention

PANELS_PER_ROW = 4
"""Largest number of maps in a row."""
MAX_MAPS = 12
"""Largest number of maps of a figure; further sources are joined with their neighbours."""
COLOUR_MAP = "cividis"
"""From dark (evicted) to light (kept); readable in grey and with any colour vision."""


def join_sources(retention: Retention, max_sources: int) -> tuple[list[str], NDArray[np.float64]]:
    """Return labels and shares [L, H, labels] of at most `max_sources` sources.

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
    """Draw a map for each source with a square for each head: layers down, KV heads across."""
    labels, shares = join_sources(retention, MAX_MAPS)
    layers, heads, count = shares.shape
    columns = min(PANELS_PER_ROW, count)
    rows = ceil(count / columns)
    each = 1.55
    height = each * min(max(layers / heads, 0.6), 2.0)
    figure = Figure(figsize=(each * columns + 1.2, (height + 0.35) * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= count:
            axes.set_visible(False)
            continue
        shown = axes.imshow(
            shares[:, :, place], vmin=0, vmax=1, cmap=COLOUR_MAP, aspect="auto", interpolation="nearest"
        )
        axes.set_title(labels[place], fontsize=9)
        axes.set_xticks(_choose_ticks(heads))
        axes.set_yticks(_choose_ticks(layers))
        axes.tick_params(labelsize=8, labelbottom=place + columns >= count)
        for edge in range(1, layers):
            axes.axhline(edge - 0.5, color="white", linewidth=0.4)
        for edge in range(1, heads):
            axes.axvline(edge - 0.5, color="white", linewidth=0.4)
    figure.supxlabel("KV head", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    bar = figure.colorbar(shown, ax=grid, shrink=0.8, pad=0.02)
    bar.set_label("share of the source's tokens kept", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _choose_ticks(count: int) -> Sequence[int]:
    """Return the indices of at most six rows or columns to label."""
    return range(0, count, max(1, ceil(count / 6)))
