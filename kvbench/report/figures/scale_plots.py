"""Plots of the energy of scales and of their differences to the scale before."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from kvbench.report.figures.styles import strip_frame

LINES = (
    ("numbers, around the mean of each channel", "#666666", "s"),
    ("difference to the scale before, around the same mean", "#d95f02", "o"),
)
"""Label, colour and marker of the two energies."""


def draw_energies(
    shares: Mapping[str, Sequence[Sequence[float]]], sizes: Sequence[tuple[int, int]], title: str
) -> Figure:
    """Draw the energies of each scale as shares of its whole energy.

    Args:
        shares: by `keys` and `values`, the plain and the predicted energies of all scales.
        sizes: height and width of each scale.
        title: of the figure.
    """
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    names = [f"{height}x{width}" for height, width in sizes]
    for number, (side, both) in enumerate(shares.items(), 1):
        axes = figure.add_subplot(1, len(shares), number)
        for energies, (label, colour, marker) in zip(both, LINES, strict=True):
            axes.plot(names, energies, color=colour, marker=marker, markersize=4, label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of the scale")
        axes.set_ylabel("share of the scale's energy")
        axes.set_title(side, fontsize=10)
        axes.tick_params(axis="x", labelsize=8)
        strip_frame(axes)
    figure.suptitle(title, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
