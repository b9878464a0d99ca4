"""Frames of plots, and output files of figures for pages and print."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from kvbench.core.files import write_whole

METADATA = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Formats of a figure, and metadata that their files omit, so that equal figures give equal bytes."""
DPI = 150
RC: Any = {
    "svg.hashsalt": "kvbench", "svg.fonttype": "none", "pdf.fonttype": 42, "image.composite_image": False,
}  # fmt: skip


def strip_frame(axes: Axes) -> None:
    """Keep two sides of a plot's frame, and draw light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG to a path, and as SVG and PDF with selectable text beside it; return the path.

    Each file is written whole or not at all, and equal figures give equal bytes.
    """
    printers: tuple[Callable[..., object], ...] = (
        FigureCanvasAgg(figure).print_png, FigureCanvasSVG(figure).print_svg, FigureCanvasPdf(figure).print_pdf,
    )  # fmt: skip
    figure.set_dpi(DPI)
    with mpl.rc_context(RC):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # `savefig` would repeat the layout for each format
        for printer, (suffix, metadata) in zip(printers, METADATA.items(), strict=True):
            buffer = io.BytesIO()
            figure.set_dpi(DPI)  # vector formats change the resolution
            printer(buffer, metadata=metadata)
            write_whole(path.with_suffix(suffix), buffer.getvalue())
    return path
