"""The README's figure, drawn from a table of the results for light and for dark pages."""

import hashlib
import io
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from docs.generator.measured import FOLDER, read_rows
from kvbench.report.figures.method_styles import COLOURS, DARK_COLOURS, choose_styles
from kvbench.report.figures.plots import Point, draw_panels

SOURCE = f"{FOLDER}/data/infinity_tiny/prices.csv"
METHODS = ("ams_kv_fixed", "first_scales", "hackpp", "heatkv", "pricekv", "random")
FIGURES = {"docs/images/fidelity.svg": False, "docs/images/fidelity-dark.svg": True}
"""Files that are drawn, and whether each is for dark pages."""
PANELS = {
    "psnr ↑": "psnr, dB (higher is better)",
    "psnr_mean_mse ↑": "psnr_mean_mse, dB (higher is better)",
    "lpips_scenes ↓": "lpips_scenes (lower is better)",
}
"""Labels of the columns that are drawn."""
TITLE = "infinity_tiny (scenes): metrics against measured memory, 95 % bands, n = 512"
NUMBERS = re.compile(r"-?[\d.]+")
DARK = {"text.color": "#d6d6d6", "axes.labelcolor": "#d6d6d6", "axes.edgecolor": "#8a8a8a"}
DARK |= {"xtick.color": "#8a8a8a", "ytick.color": "#8a8a8a"}
DARK |= {"xtick.labelcolor": "#d6d6d6", "ytick.labelcolor": "#d6d6d6"}
DARK_GRID = "#333333"


def write_figures(root: Path) -> None:
    """Draw `FIGURES` of a checkout."""
    rows = read_rows(root / SOURCE)
    curves = {column: read_points(rows, column) for column in PANELS}
    for name, dark in FIGURES.items():
        (root / name).write_bytes(draw(curves, name_source(root), dark=dark))


def name_source(root: Path) -> str:
    """Return what a figure says of its table, as the table is now."""
    return f"{SOURCE}, SHA-256 {hashlib.sha256((root / SOURCE).read_bytes()).hexdigest()}"


def read_points(rows: list[tuple[str, ...]], column: str) -> dict[str, list[Point]]:
    """Return the points of each method by ascending memory, out of a table with the names of columns in its first row.

    Cells are as in pages: `30.23 [29.92, 30.56]`, perhaps in bold.
    """
    header, *cells = rows
    place, memory = header.index(column), header.index("peak %")
    curves: dict[str, list[Point]] = {method: [] for method in METHODS}
    for row in cells:
        if row[0] in curves:
            value, low, high = map(float, NUMBERS.findall(row[place]))
            curves[row[0]].append(Point(float(row[memory]) / 100, value, low, high))
    return {method: sorted(points) for method, points in curves.items()}


def draw(curves: dict[str, dict[str, list[Point]]], source: str, *, dark: bool) -> bytes:
    """Return a figure of points by column and method as SVG that names its source; the dark one is transparent."""
    about = {"Date": None, "Creator": None, "Description": source}
    settings = {"svg.hashsalt": "kvbench", "svg.fonttype": "path", **(DARK if dark else {})}
    with mpl.rc_context(settings):
        figure = draw_panels(PANELS, curves, choose_styles(METHODS), TITLE, in_bytes=False)
        if dark:
            recolour(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=dark, metadata=about)
    return buffer.getvalue()


def recolour(figure: Figure) -> None:
    """Give lines, bands and the grid of a figure the colours of a dark page."""
    colours = dict(zip(COLOURS, DARK_COLOURS, strict=True))

    def is_drawn(artist: Artist) -> bool:
        return isinstance(artist, Line2D | Collection)

    for artist in figure.findobj(is_drawn):
        if isinstance(artist, Line2D):
            artist.set_color(colours.get(to_hex(artist.get_color()), artist.get_color()))
            artist.set_markeredgecolor(artist.get_color())
        elif len(artist.get_facecolor()):
            face = artist.get_facecolor()[0]
            artist.set_facecolor((*mpl.colors.to_rgb(colours.get(to_hex(face), to_hex(face))), face[3]))
    for axes in figure.axes:
        axes.grid(axis="y", color=DARK_GRID)
