"""Colour, marker and dashes of each method in figures, pages and notebooks."""

import zlib
from collections.abc import Sequence
from itertools import product

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5559a", "#b97b00", "#3f9fd8", "#000000")
"""Hues of Okabe and Ito's palette without yellow, dark enough for lines and small text on white."""
DARK_COLOURS = ("#4aa3df", "#ff8a4c", "#2fc79b", "#e79acb", "#f0b429", "#9bd8ff", "#e9e7e2")
"""`COLOURS` for dark pages."""
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":")
METHODS = (
    *("heatkv", "scalekv", "streaming_llm", "snapkv", "pricekv", "random", "full"),
    *("headkv", "h2o", "hard_kv", "linear_ar", "rkv", "ams_kv", "swa"),
    *("binary_heatkv", "binary_heatkv_naive", "heatkv_naive", "ams_kv_fixed", "diagonal", "scale_groups"),
    *("sta", "hack", "tova", "first_scales", "keydiff", "pyramidkv", "adakv", "hackpp"),
    *("expected_attention", "criticalkv", "critical_adakv", "cake", "meda", "lookm", "merging", "cam", "d2o"),
    *("knorm", "lagkv", "cur", "leverage", "noncausal", "compactor", "chunkkv"),
    *("triattention", "lazy_eviction", "ssd", "quest", "sparvar", "random_attention", "vase"),
    *("capkv", "lukv", "dropkv"),
)
"""Methods in the order of their styles. Append new methods, so that no other method changes its style."""
COUNT = len(COLOURS) * len(MARKERS) * len(DASHES)
"""Number of distinct styles."""

Style = tuple[str, str, str]
"""Colour, marker and dashes of a line."""


def choose_styles(names: Sequence[str]) -> dict[str, Style]:
    """Return a style for each line, distinct up to `COUNT` lines; the first word of a line's name is the method.

    A method of `METHODS` has the same style in every figure. A plugin's method gets its style by the hash of its name,
    unless another line of the figure has that style. Variants of a method share its colour.
    """
    styles: dict[str, Style] = {}
    taken: set[Style] = set()
    for name in sorted(names, key=lambda name: (name not in METHODS, _method_of(name) not in METHODS, name)):
        every = _list_styles(_find_rank(_method_of(name)))
        styles[name] = next((style for style in every if style not in taken), every[0])
        taken.add(styles[name])
    return styles


def _method_of(name: str) -> str:
    return name.replace(",", " ").split()[0]


def _find_rank(method: str) -> int:
    if method in METHODS:
        return METHODS.index(method)
    return len(METHODS) + zlib.crc32(method.encode()) % (COUNT - len(METHODS))


def _list_styles(rank: int) -> list[Style]:
    """Return all styles, beginning with the style of a rank and others of its colour."""
    turn, colour = divmod(rank, len(COLOURS))
    shifts = product(range(len(COLOURS)), range(len(MARKERS)), range(len(DASHES)))
    return [
        (
            COLOURS[(colour + c) % len(COLOURS)],
            MARKERS[(colour + turn + m) % len(MARKERS)],
            DASHES[(turn + m + d) % len(DASHES)],
        )
        for c, m, d in shifts
    ]
