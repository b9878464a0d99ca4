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


def headkv_table4(specs: Specs) -> list[PrintedFigure]:
    """Compare HeadKV's Table 4: the whole process, and the savings of methods and of smaller budgets."""
    figures: list[PrintedFigure] = []
    for name, rows in find(TABLE).models.items():
        if name not in specs:
            continue
        spec, full = specs[name], rows[0]
        printed = str(full.cells["memory GB"])
        tokens = spec.segments[-1].end
        value = tokens * token_gb(spec)
        how = f"{tokens} tokens in each of {spec.all_heads} heads; the printed number includes weights and activations"
        figures.append(
            PrintedFigure(name, "full", f"{printed} GB", f"cache {value:.2f} GB", "not derivable", how)
        )
        for row in rows[1:]:
            figures += _savings(spec, full, row)
        for method in ("linear_ar", "headkv"):
            own = [row for row in rows if row.where["method"] == (method,)]
            figures += [_step(spec, more, less) for more, less in pairwise(own)]
        figures += _local_heads(spec, rows)
    return figures


def token_gb(spec: ModelSpec) -> float:
    """Return the GB (10^9 bytes) of one token in all heads of a batch, with 16-bit keys and values."""
    return cache_bytes(spec.all_heads, spec, BATCHES[spec.name], 2) / 1e9


def image_tokens(spec: ModelSpec, row: PublishedRow) -> int:
    """Return the image tokens per head of a row's budget, a share of the image."""
    return int(Fraction(row.where["budget"][0]) * spec.drawn_tokens)


def _memory(row: PublishedRow) -> Decimal:
    return Decimal(str(row.cells["memory GB"]))


def _name(spec: ModelSpec, row: PublishedRow) -> str:
    return f"{row.where['method'][0]}, {image_tokens(spec, row)} tokens"


def _savings(spec: ModelSpec, full: PublishedRow, row: PublishedRow) -> list[PrintedFigure]:
    """Compare the savings of a method: GB from shapes, percent from the table's own GB."""
    saved, fewer = _memory(full) - _memory(row), spec.segments[-1].end - image_tokens(spec, row)
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
    fewer = image_tokens(spec, more) - image_tokens(spec, less)
    value, printed = fewer * token_gb(spec), _memory(more) - _memory(less)
    how = f"{fewer} tokens in every head, {value * 1e9 / GIB:.2f} GiB"
    if more.where["method"] == ("headkv",):
        how += "; local heads hold the same at both budgets, which should save even less"
    what = f"{_name(spec, more)} to {image_tokens(spec, less)}"
    return compare(spec.name, what, str(printed), value, "GB", how)


def _local_heads(spec: ModelSpec, rows: tuple[PublishedRow, ...]) -> list[PrintedFigure]:
    """Return the shares of local heads that explain HeadKV's savings over LineAR, in the layout of section 4."""
    figures: list[PrintedFigure] = []
    pairs = {row.where["budget"]: row for row in rows if row.where["method"] == ("linear_ar",)}
    for row in rows:
        if row.where["method"] != ("headkv",):
            continue
        less = _memory(pairs[row.where["budget"]]) - _memory(row)
        history = image_tokens(spec, row) - RECENT * spec.segments[1].length
        share = float(less) / (history * token_gb(spec))
        name, printed = f"{image_tokens(spec, row)} tokens, headkv below linear_ar", f"{less} GB"
        how = f"a local head lacks {history} tokens; heads are sorted once, so all budgets should imply one share"
        computed = f"{100 * share:.1f} % local heads"
        figures.append(PrintedFigure(spec.name, name, printed, computed, "not derivable", how))
    return figures
