"""Colour, marker and dashes of each method, the same in figures, pages and notebooks."""

import zlib
from collections.abc import Sequence
from itertools import product

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
    *("sta", "hack", "tova", "first_scales", "keydiff", "pyramidkv", "adakv", "hackpp"),
    *("expected_attention", "criticalkv", "critical_adakv", "cake", "meda", "lookm", "merging", "cam", "d2o"),
    *("knorm", "lagkv", "cur", "leverage", "noncausal", "compactor", "chunkkv"),
    *("triattention", "lazy_eviction", "ssd", "quest", "sparvar"),
)
"""Methods by the place of their style. A new method is appended, so that no other changes its style."""
PLACES = len(COLOURS) * len(MARKERS) * len(DASHES)

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
