"""Memory and attention operations in HACK++'s tables (arXiv:2606.08302), compared with values computed from shapes.

Both count every token, including the last scale. Memory is the stated share of T_K tokens in every head, keys in fp32
and values in 16 bits, in GiB. Attention takes 4 operations for each query, key and channel. A query of scale k reads
its own scale and at most B_c cached tokens, and at most B_a tokens altogether where a method selects before attention.
"ScaleKV 10 %" is therefore 1052 tokens, not the 650 of its own files.
"""

from collections.abc import Callable
from math import ceil, floor

from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import PAPER_BYTES
from kvbench.report.papers.printed import PrintedFigure, Specs, Verdict, compare, list_rows, prints_as

BATCHES = {"hackpp_table1": 1, "hackpp_table2": 32}
"""Prompts at a time, by table."""
GIB, TERA = 2**30, 10**12
COUPLED = ("streaming_llm", "h2o", "snapkv", "lookm", "cake", "meda", "hack")
"""Methods that read no more tokens than they keep."""
ROUNDINGS: dict[Callable[[float], int], Verdict] = {floor: "reproduced", ceil: "under one reading"}
"""Verdict by rounding of a share of all tokens to a number of tokens."""


def count_tera(spec: ModelSpec, batch: int, cached: int | None, read: int | None) -> float:
    """Return the operations of attention for a batch of images, in 10^12.

    Args:
        spec: the model's shapes.
        batch: prompts at a time.
        cached: largest number of earlier tokens that a head keeps; None for all.
        read: largest number of tokens that a query reads, including its own scale; None for all.
    """
    pairs = 0
    for at in spec.segments:
        keys = min(at.start, at.start if cached is None else cached) + at.length
        pairs += at.length * min(keys, keys if read is None else read)
    return 4 * spec.branches * batch * spec.all_heads * spec.head_dim * pairs / TERA


def compare_tables(name: str, specs: Specs) -> list[PrintedFigure]:
    """Compare HACK++'s table of Infinity (HART is not supported) or of VAR, one of `BATCHES`."""
    figures, batch = [], BATCHES[name]
    for spec, _, row in list_rows(name, specs):
        method, share = row.where["method"][0], float(row.where["budget"][0])
        memory, work = row.cells["cache GiB"], row.cells["attention TFLOPs"]
        what = f"{method} at {share:g}"
        if memory is not None:
            how = f"{share:g} of {spec.segments[-1].end} tokens in each of {spec.all_heads} heads, batch {batch}"
            rows = spec.branches * batch * spec.all_heads
            value = share * spec.segments[-1].end * rows * spec.head_dim * PAPER_BYTES / GIB
            figures.append(compare(spec.name, what, memory, value, "GiB", how))
        if work is not None:
            read = share if method in COUPLED else float(row.where.get("method.attention_budget", ("1",))[0])
            figures.append(_compare_work(spec, what, work, batch, 1 if method in COUPLED else share, read))
    return figures


def _compare_work(
    spec: ModelSpec, what: str, text: str, batch: int, kept: float, read: float
) -> PrintedFigure:
    """Compare operations with shares rounded down to whole tokens, or up where only that reproduces the paper."""
    tokens, candidates = spec.segments[-1].end, []
    for whole, verdict in ROUNDINGS.items():
        cached, seen = (None if share == 1 else whole(share * tokens) for share in (kept, read))
        limits = [f"{n} {word}" for n, word in ((cached, "cached"), (seen, "read")) if n is not None]
        value, how = count_tera(spec, batch, cached, seen), f"{' and '.join(limits) or 'all'} tokens a head"
        if prints_as(value, text):
            return compare(spec.name, what, text, value, "TFLOPs", how, verdict)
        candidates.append((value, how))
    value, how = candidates[0]
    how += f": {100 * (value / float(text) - 1):+.1f} %; its heads have unequal budgets, or protect tokens beyond them"
    return compare(spec.name, what, text, value, "TFLOPs", how)
