"""Memory and attention's work in HACK++'s tables (arXiv:2606.08302) against shapes.

Both count every token, those of the last scale too. Memory is the stated share of T_K tokens in every head, keys in
fp32 and values in 16 bits, in GiB. Work is 4 operations for each query, key and channel, of the attention alone. How
many keys a query of scale k sees follows from the budgets: all so far, no more than B_a of them where a method cuts
before attention, and what is cached, no more than B_c, beside its own scale. "ScaleKV 10 %" is 1052 tokens so, not the
650 of its own files.
"""

from collections.abc import Callable
from math import ceil, floor

from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import PAPER_BYTES
from kvbench.report.papers.printed import Claim, Specs, Verdict, compare, prints_as
from kvbench.report.papers.published import PublishedRow, find, model_of

BATCHES = {"hackpp_table1": 1, "hackpp_table2": 32}
"""Prompts at a time, by table."""
GIB, TERA = 2**30, 10**12
COUPLED = ("streaming_llm", "h2o", "snapkv", "lookm", "cake", "meda", "hack")
"""Methods that read no more than they keep, as their papers have them."""
ROUNDINGS: dict[Callable[[float], int], Verdict] = {floor: "reproduced", ceil: "under one reading"}
"""Ways to turn a share of all tokens into a number of tokens, with the name of each."""


def hackpp_table1(specs: Specs) -> list[Claim]:
    """HACK++, Infinity at batch 1; HART, which is not here, is left out."""
    return _make_claims("hackpp_table1", specs)


def hackpp_table2(specs: Specs) -> list[Claim]:
    """HACK++, VAR at batch 32."""
    return _make_claims("hackpp_table2", specs)


def count_gib(share: float, spec: ModelSpec, batch: int) -> float:
    """Return the GiB that a share of all tokens T_K takes in every head, as the paper counts it."""
    rows = spec.branches * batch * spec.all_heads
    return share * spec.segments[-1].end * rows * spec.head_dim * PAPER_BYTES / GIB


def count_tera(spec: ModelSpec, batch: int, cached: int | None, read: int | None) -> float:
    """Return the attention's operations for a batch of images, in 10^12.

    Args:
        spec: the model's shapes.
        batch: prompts at a time.
        cached: tokens that a head keeps of the scales before, at most; None for all.
        read: tokens that a query sees, its own scale's among them, at most; None for all.
    """
    pairs = 0
    for at in spec.segments:
        keys = min(at.start, at.start if cached is None else cached) + at.length
        pairs += at.length * min(keys, keys if read is None else read)
    return 4 * spec.branches * batch * spec.all_heads * spec.head_dim * pairs / TERA


def _make_claims(name: str, specs: Specs) -> list[Claim]:
    claims: list[Claim] = []
    for label, rows in find(name).models.items():
        for row in rows if model_of(label) in specs else ():
            claims += _compare_row(specs[model_of(label)], row, BATCHES[name])
    return claims


def _compare_row(spec: ModelSpec, row: PublishedRow, batch: int) -> list[Claim]:
    method, share = row.where["method"][0], float(row.where["budget"][0])
    memory, work = row.cells["cache GiB"], row.cells["attention TFLOPs"]
    what, claims = f"{method} at {share:g}", []
    if memory is not None:
        how = f"{share:g} of {spec.segments[-1].end} tokens in each of {spec.all_heads} heads, batch {batch}"
        claims.append(compare(spec.name, what, memory, count_gib(share, spec, batch), "GiB", how))
    if work is not None:
        read = share if method in COUPLED else float(row.where.get("method.attention_budget", ("1",))[0])
        claims.append(_compare_work(spec, what, work, batch, 1 if method in COUPLED else share, read))
    return claims


def _compare_work(spec: ModelSpec, what: str, text: str, batch: int, kept: float, read: float) -> Claim:
    """Compare operations with shares of tokens that are rounded down, or up where only that prints as the paper's."""
    tokens, found = spec.segments[-1].end, []
    for whole, verdict in ROUNDINGS.items():
        cached, seen = (None if share == 1 else whole(share * tokens) for share in (kept, read))
        limits = [f"{n} {word}" for n, word in ((cached, "cached"), (seen, "read")) if n is not None]
        found.append(
            (count_tera(spec, batch, cached, seen), f"{' and '.join(limits) or 'all'} tokens a head", verdict)
        )
    for value, how, verdict in found:
        if prints_as(value, text):
            return compare(spec.name, what, text, value, "TFLOPs", how, verdict)
    value, how, _ = found[0]
    how += f": {100 * (value / float(text) - 1):+.1f} %; its heads have unequal budgets, or protect tokens beyond them"
    return compare(spec.name, what, text, value, "TFLOPs", how)
