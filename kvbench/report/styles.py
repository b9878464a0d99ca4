"""Styles of figures: one line style per method, and output files for pages and for print."""

import io
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.core.files import write_whole

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5559a", "#b97b00", "#3f9fd8", "#000000")
"""Hues of Okabe and Ito's palette, as dark as lines and small letters on white need; without its yellow."""
DARK_COLOURS = ("#4aa3df", "#ff8a4c", "#2fc79b", "#e79acb", "#f0b429", "#9bd8ff", "#e9e7e2")
"""The same colours on a dark page."""
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":")
METHODS = (
    *("heatkv", "scalekv", "streaming_llm", "snapkv", "pricekv", "random", "full"),
    *("headkv", "h2o", "hard_kv", "linear_ar", "rkv", "ams_kv", "swa"),
    *("binary_heatkv", "binary_heatkv_naive", "heatkv_naive", "ams_kv_fixed", "diagonal", "scale_groups"),
    *("sta", "hack", "first_scales", "tova", "keydiff", "pyramidkv", "adakv", "hackpp"),
)
"""Methods by the place of their style. A new method is appended, so that no other changes its style."""
PLACES = len(COLOURS) * len(MARKERS)

Style = tuple[str, str, str]
"""Colour, marker and dashes of a line."""


def choose_styles(names: Sequence[str]) -> dict[str, Style]:
    """Return a style for each line, no two alike.

    A method of `METHODS` has the same style in every figure, and so has a plugin's method, by the hash of its name,
    unless another line of the figure has that style. Variants of a method share its colour.

    Args:
        names: of the lines; the first word of each is its method.
    """
    found: dict[str, Style] = {}
    taken: set[Style] = set()
    for name in sorted(names, key=lambda name: (name not in METHODS, _method_of(name) not in METHODS, name)):
        found[name] = next(style for style in _list_styles(_place(_method_of(name))) if style not in taken)
        taken.add(found[name])
    return found


def _method_of(name: str) -> str:
    return name.replace(",", " ").split()[0]


def _place(method: str) -> int:
    if method in METHODS:
        return METHODS.index(method)
    return len(METHODS) + zlib.crc32(method.encode()) % (PLACES - len(METHODS))


def _list_styles(place: int) -> list[Style]:
    """Return every style, that of a place first, then others of its colour."""
    turn, colour = divmod(place, len(COLOURS))
    shifts = product(range(len(COLOURS)), range(len(MARKERS)), range(len(DASHES)))
    return [
        (
            COLOURS[(colour + c) % len(COLOURS)],
            MARKERS[(colour + turn + m) % len(MARKERS)],
            DASHES[(turn + m + d) % len(DASHES)],
        )
        for c, m, d in shifts
    ]


def strip_frame(axes: Axes) -> None:
    """Leave of a plot's frame two sides, and light lines across."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG to a path, and as SVG with letters as text beside it; return the path.

    Files are whole or not there, and equal figures give equal bytes.
    """
    with mpl.rc_context({"svg.hashsalt": "kvbench", "svg.fonttype": "none"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=metadata)
            write_whole(path.with_suffix(suffix), buffer.getvalue())
    return path
