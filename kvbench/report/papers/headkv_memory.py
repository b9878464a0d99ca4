"""HeadKV's Table 4 (arXiv:2605.20600), memory of the whole process, compared with the cache computed from shapes.

The printed gigabytes include weights, activations and the allocator's reserve, which do not follow from shapes.
Differences between budgets do: only the cache changes. Keys and values have 16 bits, for both branches of guidance; GB
are 10^9 bytes, as the difference between LineAR's budgets confirms.
"""

from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import cache_bytes
from kvbench.report.papers.printed import PrintedFigure, Specs, compare
from kvbench.report.papers.published import PublishedRow, find

TABLE = "headkv_table4"
BATCHES = {"llamagen_xl": 128, "janus_pro_7b": 55, "lumina_mgpt_7b_768": 6}
"""Prompts at a time, by model."""
RECENT = 2
"""Rows of the image that a local head holds (section 5.1)."""
GIB = 2**30
METHODS = ("linear_ar", "headkv")
"""Methods of the table, at the same budgets."""


def headkv_table4(specs: Specs) -> list[PrintedFigure]:
    """Compare HeadKV's Table 4: the whole process, and the savings of methods and of smaller budgets."""
    figures: list[PrintedFigure] = []
    for name, rows in find(TABLE).models.items():
        if name in specs:
            spec, (full, *others) = specs[name], rows
            tokens = spec.segments[-1].end
            how = (
                f"{tokens} tokens in each of {spec.all_heads} heads; the printed number includes weights and "
            )
            how += "activations"
            value = f"cache {tokens * token_gb(spec):.2f} GB"
            figures.append(PrintedFigure(name, "full", f"{_memory(full)} GB", value, "not derivable", how))
            figures += [figure for row in others for figure in _compare_saving(spec, full, row)]
            by_method = {one: [row for row in others if row.where["method"] == (one,)] for one in METHODS}
            figures += [_step(spec, *pair) for own in by_method.values() for pair in pairwise(own)]
            figures += [_compare_heads(spec, *pair) for pair in zip(*by_method.values(), strict=True)]
    return figures


def token_gb(spec: ModelSpec) -> float:
    """Return the GB (10^9 bytes) of one token in all heads of a batch, with 16-bit keys and values."""
    return cache_bytes(spec.all_heads, spec, BATCHES[spec.name], 2) / 1e9


def _count(spec: ModelSpec, row: PublishedRow) -> int:
    """Return the image tokens per head of a row's budget, a share of the image."""
    return int(Fraction(row.where["budget"][0]) * spec.drawn_tokens)


def _memory(row: PublishedRow) -> Decimal:
    return Decimal(str(row.cells["memory GB"]))


def _name(spec: ModelSpec, row: PublishedRow) -> str:
    return f"{row.where['method'][0]}, {_count(spec, row)} tokens"


def _compare_saving(spec: ModelSpec, full: PublishedRow, row: PublishedRow) -> list[PrintedFigure]:
    """Compare the savings of a method: GB from shapes, percent from the table's own GB."""
    saved, fewer = _memory(full) - _memory(row), spec.segments[-1].end - _count(spec, row)
    value, what = fewer * token_gb(spec), _name(spec, row)
    how = f"{fewer} tokens less in every head ({value * 1e9 / GIB:.2f} GiB); the program's other memory is not given"
    if row.where["method"] == ("headkv",):
        how += "; which heads are local depends on the images"
    printed, source = f"{_memory(full)} - {_memory(row)} = {saved} GB", "from the printed memory alone"
    share = float(100 * saved / _memory(full))
    return [
        PrintedFigure(spec.name, f"{what}, saved", printed, f"{value:.2f} GB", "not derivable", how),
        compare(spec.name, f"{what}, saving", str(row.cells["saving %"]), share, "%", source),
    ]


def _step(spec: ModelSpec, more: PublishedRow, less: PublishedRow) -> PrintedFigure:
    """Compare the savings of a method from one budget to the next; other memory is the same."""
    fewer = _count(spec, more) - _count(spec, less)
    value, printed = fewer * token_gb(spec), _memory(more) - _memory(less)
    how = f"{fewer} tokens in every head, {value * 1e9 / GIB:.2f} GiB"
    if more.where["method"] == ("headkv",):
        how += "; local heads hold the same at both budgets, which should save even less"
    what = f"{_name(spec, more)} to {_count(spec, less)}"
    return compare(spec.name, what, str(printed), value, "GB", how)


def _compare_heads(spec: ModelSpec, plain: PublishedRow, row: PublishedRow) -> PrintedFigure:
    """Return the share of local heads that explains HeadKV's saving over LineAR, in the layout of section 4."""
    less, history = _memory(plain) - _memory(row), _count(spec, row) - RECENT * spec.segments[1].length
    share = float(less) / (history * token_gb(spec))
    what = f"{_count(spec, row)} tokens, headkv below linear_ar"
    how = f"a local head lacks {history} tokens; heads are sorted once, so all budgets should imply one share"
    return PrintedFigure(
        spec.name, what, f"{less} GB", f"{100 * share:.1f} % local heads", "not derivable", how
    )
