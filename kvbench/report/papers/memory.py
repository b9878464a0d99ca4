"""Memory and operations in papers' tables, computed from shapes; some of them do not follow from shapes.

Both branches of guidance count. Keys are in fp32 and values in 16 bits, except in HeadKV's table.

* HeatKV (arXiv:2605.14877) counts the tokens cached before the last scale, in MiB.
* AMS-KV (arXiv:2511.16047) counts all scales and writes GB for 1000 MiB.
* HeadKV's Table 4 (arXiv:2605.20600) has the memory of the whole process, with weights, activations and the allocator's
  reserve, which do not follow from shapes. Differences between budgets do: only the cache changes. Keys and values have
  16 bits; GB are 10^9 bytes, as the difference between LineAR's budgets confirms.
* HACK++ (arXiv:2606.08302) counts every token, including the last scale. Memory is the stated share of T_K tokens in
  every head, in GiB. Attention takes 4 operations for each query, key and channel. A query of scale k reads its own
  scale and at most B_c cached tokens, and at most B_a tokens altogether where a method selects before attention.
  "ScaleKV 10 %" is therefore 1052 tokens, not the 650 of its own files.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import ceil, floor

from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import MIB, PAPER_BYTES, cache_bytes, paper_mib
from kvbench.methods.ams_kv import effective_capacities
from kvbench.report.papers.printed import (
    PrintedFigure,
    Specs,
    Verdict,
    compare,
    list_rows,
    prints_as,
    rounding_interval,
)
from kvbench.report.papers.published import PublishedRow, PublishedTable, find, model_of

HEATKV_TOKENS = {"0.2": 1300, "0.1": 650, "0.04": 265}
"""Tokens per head that HeatKV's Table 1 counts under each nominal budget; 650 comes from ScaleKV."""
AMS_BATCH = 50
"""Batch of AMS-KV's Table 3 where its label names no other."""
CONDENSED = 2
"""AMS-KV's condensed scales. `effective_capacities` gives its capacities: counting the last scale among the last two
would need at least 26 % of the cache of VAR-d30, where Table 3 reports 21 %."""
EQ4_BYTES, FITTING_BYTES = 16, 12
"""Bytes per token and channel in AMS-KV's Eq. 4, and those that give its tables: two branches of 4 + 2 bytes."""

HEADKV_BATCHES = {"llamagen_xl": 128, "janus_pro_7b": 55, "lumina_mgpt_7b_768": 6}
"""Prompts at a time in HeadKV's Table 4, by model."""
HEADKV_METHODS = ("linear_ar", "headkv")
"""Methods of HeadKV's Table 4, at the same budgets."""
RECENT_ROWS = 2
"""Rows of the image that a local head holds (HeadKV, section 5.1)."""
HACKPP_BATCHES = {"hackpp_table1": 1, "hackpp_table2": 32}
"""Batch size in prompts of HACK++'s tables."""
COUPLED = ("streaming_llm", "h2o", "snapkv", "lookm", "cake", "meda", "hack")
"""Methods that read no more tokens than they keep."""
ROUNDINGS: dict[Callable[[float], int], Verdict] = {floor: "reproduced", ceil: "under one reading"}
"""Verdict by the way in which a share of all tokens is rounded to a number of tokens."""
GIB, TERA = 2**30, 10**12


def all_scales(spec: ModelSpec) -> int:
    """Return the tokens of a sequence with its last scale, T x c_K, as AMS-KV counts the full cache."""
    return spec.all_heads * spec.segments[-1].end


def two_class_tokens(spec: ModelSpec, demanding: int, capacity: tuple[int, int]) -> int:
    """Return the tokens of a sequence with N_CD layers at C_max and the others at C_min (AMS-KV Eq. 4)."""
    low, high = capacity
    return spec.heads * (demanding * high + (spec.layers - demanding) * low)


def implied_layers(tokens: float, spec: ModelSpec, capacity: tuple[int, int]) -> float:
    """Return N_CD, a real number, at which `two_class_tokens` gives `tokens`."""
    low, high = capacity
    return (tokens / spec.heads - spec.layers * low) / (high - low)


def thousands(tokens: float, spec: ModelSpec, batch: int) -> float:
    """Return the cache in AMS-KV's GB, each of 1000 MiB."""
    return paper_mib(tokens, spec, batch) / 1000


def heatkv_table1(specs: Specs) -> Iterator[PrintedFigure]:
    """Compare HeatKV's Table 1, batch 8: every cell follows from 1300, 650 and 265 tokens per head."""
    rows = list_rows("heatkv_table1", specs)
    printed = {(name, row.where["budget"][0]): str(row.cells["cache MiB"]) for _, name, row in rows}
    for (name, budget), text in printed.items():  # all methods of the table have the same cells
        spec = specs[name]
        tokens = HEATKV_TOKENS.get(budget, spec.cached_length)
        value = paper_mib(tokens * spec.all_heads, spec, 8)
        nominal = paper_mib(float(budget) * spec.full_tokens, spec, 8)
        how = f"{tokens} tokens per head"
        if tokens != spec.cached_length:
            how += f", b = {tokens / spec.cached_length:.4f}; {budget} itself would give {nominal:.0f}"
        yield compare(name, f"budget {budget}", text, value, "MiB", how)


def ams_kv_table3(specs: Specs) -> Iterator[PrintedFigure]:
    """Compare AMS-KV's Table 3: no whole number of demanding layers gives the compressed caches."""
    for spec, label, row in list_rows("ams_kv_table3", specs):
        size = re.search(r"batch (\d+)", label)
        if "CFG" not in label:  # models with CFG have the memory of the others
            yield from _ams_row(spec, row, int(size[1]) if size else AMS_BATCH)


def ams_kv_table6(specs: Specs) -> Iterator[PrintedFigure]:
    """Compare AMS-KV's Table 6: compressed caches have a different number of demanding layers than in Table 3."""
    for spec, _, row in list_rows("ams_kv_table6", specs):
        yield from _ams_row(spec, row, int(row.where["latency.batch"][0]))


def ams_kv_eq4(specs: Specs) -> Iterator[PrintedFigure]:
    """Compare AMS-KV's Eq. 4 and the figures of its text, which follow under other readings only."""
    printed = find("ams_kv_table3").models
    for label, batch in (("var_d30", 50), ("var_d36 (batch 25)", 25)):
        name = model_of(label)
        for factor in (EQ4_BYTES, FITTING_BYTES) if name in specs else ():
            # Eq. 4: factor x B x D x tokens / 1024^2, where tokens counts all heads.
            value = factor * batch * specs[name].head_dim * all_scales(specs[name]) / MIB / 1000
            how = f"Eq. 4 prints the factor {EQ4_BYTES}: fp32 keys and values"
            if factor == FITTING_BYTES:
                how = f"the factor {FITTING_BYTES}: fp32 keys, 16-bit values"
            what = f"full cache, batch {batch}, factor {factor}"
            full = str(printed[label][0].cells["cache 1000 MiB"])
            yield compare(name, what, full, value, "x 1000 MiB", how)
    yield from _compare_text(specs)


def _ams_row(spec: ModelSpec, row: PublishedRow, batch: int) -> Iterator[PrintedFigure]:
    text, saving = str(row.cells["cache 1000 MiB"]), row.cells.get("saving %")
    match = re.search(r"\d[\d.]*", text)
    if row.where["method"] == ("full",):
        value = thousands(all_scales(spec), spec, batch)
        how = f"all {len(spec.segments)} scales counted"
        what = f"full, batch {batch}"
        if match is None or not text[0].isdigit():
            verdict: Verdict = "no number printed" if match is None else "not derivable"
            how += "" if match is None else f"; the caption says about {match[0]} GB"
            yield PrintedFigure(spec.name, what, text, f"{value:.3f} x 1000 MiB", verdict, how)
        else:
            yield compare(spec.name, what, text, value, "x 1000 MiB", how)
        return
    capacity, full = effective_capacities(spec, CONDENSED), all_scales(spec)
    unit, what = thousands(1, spec, batch), f"AMS-KV, batch {batch}"
    yield _two_class(spec, what, text, "x 1000 MiB", lambda tokens: tokens * unit)
    if saving is not None:
        yield _two_class(spec, f"{what}, saving", saving, "%", lambda tokens: 100 * (1 - tokens / full))
    if batch == 25:  # only this table fits another split
        tokens = spec.heads * (20 * capacity[1] + 16 * sum(spec.lengths[:7]))
        how = "20 layers at C_max, 16 stuck with scales 1 to 7; not in the text"
        yield compare(spec.name, what, text, tokens * unit, "x 1000 MiB", how, "under one reading")


def _two_class(
    spec: ModelSpec, what: str, text: str, unit: str, measure: Callable[[float], float]
) -> PrintedFigure:
    """Compare a compressed cache with those of the two integers next to its implied number of demanding layers."""
    capacity = effective_capacities(spec, CONDENSED)
    zero, slope = measure(0), measure(1) - measure(0)
    low, high = sorted(
        implied_layers((bound - zero) / slope, spec, capacity) for bound in rounding_interval(text)
    )
    below = floor(low)
    near = [(n, measure(two_class_tokens(spec, n, capacity))) for n in (below, below + 1)]
    hits = [n for n, value in near if prints_as(value, text)]
    how = (
        f"C_min {capacity[0]}, C_max {capacity[1]} need {low:.2f} to {high:.2f} demanding layers of {spec.layers}"
        + ("" if hits else ": no whole number")
    )
    computed = ", ".join(f"{value:.3f} at {n}" for n, value in near) + " layers"
    verdict: Verdict = "reproduced" if hits else "not derivable"
    return PrintedFigure(spec.name, what, f"{text} {unit}", computed, verdict, how)


def _compare_text(specs: Specs) -> Iterator[PrintedFigure]:
    text = find("ams_kv_text").models
    if "var_d30" in specs:
        spec, printed = specs["var_d30"], str(text["var_d30 (largest saving)"][0].cells["saving %"])
        least = spec.leading_tokens(CONDENSED) + spec.lengths[-4]
        capacity = least, effective_capacities(spec, CONDENSED)[1]
        tokens = two_class_tokens(spec, spec.layers // 6, capacity)
        value = 100 * (1 - tokens / all_scales(spec))
        how = f"a sixth of the layers at {capacity[1]}, the others at {capacity[0]} tokens, a scale less than C_min"
        yield compare(spec.name, "abstract, saving", printed, value, "%", how, "under one reading")
    if "infinity_2b" in specs:
        spec, rows = specs["infinity_2b"], text["infinity_2b"]
        full, less = (Decimal(str(row.cells["memory GB"])) for row in rows)
        tokens = two_class_tokens(spec, 28, effective_capacities(spec, CONDENSED))
        value = paper_mib(all_scales(spec) - tokens, spec, 2) / 1024
        how = "2 prompts in GiB, 28 demanding layers of 32, last scale counted; batch and unit are not stated"
        saved = f"{full} - {less} = {full - less} GB"
        yield PrintedFigure(spec.name, "memory saved", saved, f"{value:.3f} GiB", "under one reading", how)
        share = float(100 * (full - less) / full)
        what, how = "memory saved, share", f"({full} - {less}) / {full}; the text's own numbers disagree"
        yield compare(spec.name, what, str(rows[1].cells["saving %"]), share, "%", how)


def headkv_table4(specs: Specs) -> Iterator[PrintedFigure]:
    """Compare HeadKV's Table 4: the whole process, and the savings of methods and of smaller budgets."""
    for name, (full, *others) in find("headkv_table4").models.items():
        if name not in specs:
            continue
        spec = specs[name]
        tokens = spec.segments[-1].end
        how = f"{tokens} tokens in each of {spec.all_heads} heads; the printed number includes weights and activations"
        value = f"cache {tokens * token_gb(spec):.2f} GB"
        yield PrintedFigure(name, "full", f"{_memory(full)} GB", value, "not derivable", how)
        for row in others:
            yield from _compare_saving(spec, full, row)
        by_method = [[row for row in others if row.where["method"] == (method,)] for method in HEADKV_METHODS]
        yield from (_step(spec, *pair) for rows in by_method for pair in pairwise(rows))
        yield from (_compare_heads(spec, *pair) for pair in zip(*by_method, strict=True))


def token_gb(spec: ModelSpec) -> float:
    """Return the GB (10^9 bytes) of one token in all heads of a batch, with 16-bit keys and values."""
    return cache_bytes(spec.all_heads, spec, HEADKV_BATCHES[spec.name], 2) / 1e9


def _count(spec: ModelSpec, row: PublishedRow) -> int:
    """Return the image tokens per head of a row's budget, a share of the image."""
    return int(Fraction(row.where["budget"][0]) * spec.drawn_tokens)


def _memory(row: PublishedRow) -> Decimal:
    return Decimal(str(row.cells["memory GB"]))


def _name(spec: ModelSpec, row: PublishedRow) -> str:
    return f"{row.where['method'][0]}, {_count(spec, row)} tokens"


def _compare_saving(spec: ModelSpec, full: PublishedRow, row: PublishedRow) -> Iterator[PrintedFigure]:
    """Compare the savings of a method: GB from shapes, percent from the table's GB."""
    saved, fewer = _memory(full) - _memory(row), spec.segments[-1].end - _count(spec, row)
    value, what = fewer * token_gb(spec), _name(spec, row)
    how = f"{fewer} tokens less in every head ({value * 1e9 / GIB:.2f} GiB); the program's other memory is not given"
    if row.where["method"] == ("headkv",):
        how += "; which heads are local depends on the images"
    printed, source = f"{_memory(full)} - {_memory(row)} = {saved} GB", "from the printed memory alone"
    share = float(100 * saved / _memory(full))
    yield PrintedFigure(spec.name, f"{what}, saved", printed, f"{value:.2f} GB", "not derivable", how)
    yield compare(spec.name, f"{what}, saving", str(row.cells["saving %"]), share, "%", source)


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
    less, history = _memory(plain) - _memory(row), _count(spec, row) - RECENT_ROWS * spec.segments[1].length
    share = float(less) / (history * token_gb(spec))
    what = f"{_count(spec, row)} tokens, headkv below linear_ar"
    how = f"a local head lacks {history} tokens; heads are sorted once, so all budgets should imply one share"
    return PrintedFigure(
        spec.name, what, f"{less} GB", f"{100 * share:.1f} % local heads", "not derivable", how
    )


def count_tera(spec: ModelSpec, batch: int, cached: int | None, read: int | None) -> float:
    """Return the operations of attention for a batch of images, in 10^12.

    A head keeps at most `cached` earlier tokens, and a query reads at most `read` tokens, its scale's too; None: all.
    """
    pairs = 0
    for at in spec.segments:
        keys = min(at.start, at.start if cached is None else cached) + at.length
        pairs += at.length * min(keys, keys if read is None else read)
    return 4 * spec.branches * batch * spec.all_heads * spec.head_dim * pairs / TERA


def hackpp_table(name: str, specs: Specs) -> Iterator[PrintedFigure]:
    """Compare HACK++'s table of Infinity (HART is not supported) or of VAR, one of `HACKPP_BATCHES`."""
    batch = HACKPP_BATCHES[name]
    for spec, _, row in list_rows(name, specs):
        method, share = row.where["method"][0], float(row.where["budget"][0])
        memory, work = row.cells["cache GiB"], row.cells["attention TFLOPs"]
        what = f"{method} at {share:g}"
        if memory is not None:
            how = f"{share:g} of {spec.segments[-1].end} tokens in each of {spec.all_heads} heads, batch {batch}"
            rows = spec.branches * batch * spec.all_heads
            value = share * spec.segments[-1].end * rows * spec.head_dim * PAPER_BYTES / GIB
            yield compare(spec.name, what, memory, value, "GiB", how)
        if work is not None:
            read = share if method in COUPLED else float(row.where.get("method.attention_budget", ("1",))[0])
            yield _compare_work(spec, what, work, batch, 1 if method in COUPLED else share, read)


def _compare_work(
    spec: ModelSpec, what: str, text: str, batch: int, kept: float, read: float
) -> PrintedFigure:
    """Compare operations with shares rounded down to tokens, or up where only that reproduces the paper."""
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


TABLES: Mapping[str, Callable[[Specs], Iterator[PrintedFigure]]] = {
    "heatkv_table1": heatkv_table1,
    "ams_kv_table3": ams_kv_table3,
    "ams_kv_table6": ams_kv_table6,
    "ams_kv_eq4": ams_kv_eq4,
    "headkv_table4": headkv_table4,
    **{name: partial(hackpp_table, name) for name in HACKPP_BATCHES},
}
"""Accepted values of `plan.table`."""


def sources(name: str) -> list[PublishedTable]:
    """Return the published tables behind a memory table, named as in `plan.table`."""
    return [find(part) for part in (("ams_kv_table3", "ams_kv_text") if name == "ams_kv_eq4" else (name,))]


def models(name: str) -> tuple[str, ...]:
    """Return the models whose shapes a memory table needs."""
    return tuple(dict.fromkeys(model_of(label) for table in sources(name) for label in table.models))
