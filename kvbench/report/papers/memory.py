"""Memory columns of papers, computed from shapes; some of them do not follow from shapes.

HeatKV (arXiv:2605.14877) counts the tokens cached before the last scale, in MiB. AMS-KV (arXiv:2511.16047) counts all
scales and writes GB for 1000 MiB. Both hold fp32 keys and 16-bit values, for both branches of guidance. HeadKV's table
is in `headkv_memory`, HACK++'s tables are in `hackpp_costs`.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from math import floor

from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import MIB, paper_mib
from kvbench.methods.ams_kv import effective_capacities
from kvbench.report.papers.hackpp_costs import BATCHES, compare_tables
from kvbench.report.papers.headkv_memory import headkv_table4
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


def all_scales(spec: ModelSpec) -> int:
    """Return the tokens of a sequence with its last scale, T x c_K, as AMS-KV counts the full cache."""
    return spec.all_heads * spec.segments[-1].end


def two_class_tokens(spec: ModelSpec, demanding: int, capacity: tuple[int, int]) -> int:
    """Return the tokens of a sequence with N_CD layers at C_max and the others at C_min (AMS-KV Eq. 4)."""
    low, high = capacity
    return spec.heads * (demanding * high + (spec.layers - demanding) * low)


def implied_layers(tokens: float, spec: ModelSpec, capacity: tuple[int, int]) -> float:
    """Return the real number N_CD at which `two_class_tokens` gives a number of tokens."""
    low, high = capacity
    return (tokens / spec.heads - spec.layers * low) / (high - low)


def thousands(tokens: float, spec: ModelSpec, batch: int) -> float:
    """Return AMS-KV's GB, which are 1000 MiB."""
    return paper_mib(tokens, spec, batch) / 1000


def heatkv_table1(specs: Specs) -> list[PrintedFigure]:
    """Compare HeatKV's Table 1, batch 8: every cell follows from 1300, 650 and 265 tokens per head."""
    figures = []
    rows = list_rows("heatkv_table1", specs)
    printed = {(name, row.where["budget"][0]): str(row.cells["cache MiB"]) for _, name, row in rows}
    for (name, budget), text in printed.items():  # which all methods share
        spec = specs[name]
        tokens = HEATKV_TOKENS.get(budget, spec.cached_length)
        value = paper_mib(tokens * spec.all_heads, spec, 8)
        nominal = paper_mib(float(budget) * spec.full_tokens, spec, 8)
        how = f"{tokens} tokens per head"
        if tokens != spec.cached_length:
            how += f", b = {tokens / spec.cached_length:.4f}; {budget} itself would give {nominal:.0f}"
        figures.append(compare(name, f"budget {budget}", text, value, "MiB", how))
    return figures


def ams_kv_table3(specs: Specs) -> list[PrintedFigure]:
    """Compare AMS-KV's Table 3: no whole number of demanding layers gives the compressed caches."""
    figures = []
    for spec, label, row in list_rows("ams_kv_table3", specs):
        size = re.search(r"batch (\d+)", label)
        if "CFG" not in label:  # the same memory under other sampling
            figures += _ams_row(spec, row, int(size[1]) if size else AMS_BATCH)
    return figures


def ams_kv_table6(specs: Specs) -> list[PrintedFigure]:
    """Compare AMS-KV's Table 6: compressed caches need another number of demanding layers than in Table 3."""
    rows = list_rows("ams_kv_table6", specs)
    return [one for spec, _, row in rows for one in _ams_row(spec, row, int(row.where["latency.batch"][0]))]


def ams_kv_eq4(specs: Specs) -> list[PrintedFigure]:
    """Compare AMS-KV's Eq. 4 and the figures of its text, which follow under other readings only."""
    figures: list[PrintedFigure] = []
    full = {
        label: str(rows[0].cells["cache 1000 MiB"]) for label, rows in find("ams_kv_table3").models.items()
    }
    for label, batch in (("var_d30", 50), ("var_d36 (batch 25)", 25)):
        name = model_of(label)
        for factor in (EQ4_BYTES, FITTING_BYTES) if name in specs else ():
            # Eq. 4: factor x B x D x tokens / 1024^2, where tokens counts all heads.
            value = factor * batch * specs[name].head_dim * all_scales(specs[name]) / MIB / 1000
            how = f"Eq. 4 prints the factor {EQ4_BYTES}: fp32 keys and values"
            if factor == FITTING_BYTES:
                how = f"the factor {FITTING_BYTES}: fp32 keys, 16-bit values"
            what = f"full cache, batch {batch}, factor {factor}"
            figures.append(compare(name, what, full[label], value, "x 1000 MiB", how))
    return figures + _compare_text(specs)


TABLES: Mapping[str, Callable[[Specs], list[PrintedFigure]]] = {
    "heatkv_table1": heatkv_table1,
    "ams_kv_table3": ams_kv_table3,
    "ams_kv_table6": ams_kv_table6,
    "ams_kv_eq4": ams_kv_eq4,
    "headkv_table4": headkv_table4,
    **{name: partial(compare_tables, name) for name in BATCHES},
}
"""Accepted values of `plan.table`."""


def sources(name: str) -> list[PublishedTable]:
    """Return the published tables that a memory table uses."""
    return [find(part) for part in (("ams_kv_table3", "ams_kv_text") if name == "ams_kv_eq4" else (name,))]


def models(name: str) -> tuple[str, ...]:
    """Return the models whose shapes a memory table needs."""
    return tuple(dict.fromkeys(model_of(label) for table in sources(name) for label in table.models))


def _ams_row(spec: ModelSpec, row: PublishedRow, batch: int) -> list[PrintedFigure]:
    text, saving = str(row.cells["cache 1000 MiB"]), row.cells.get("saving %")
    number = re.search(r"\d[\d.]*", text)
    if row.where["method"] == ("full",):
        value = thousands(all_scales(spec), spec, batch)
        how = f"all {len(spec.segments)} scales counted"
        what = f"full, batch {batch}"
        if number is None or not text[0].isdigit():
            verdict: Verdict = "no number printed" if number is None else "not derivable"
            how += "" if number is None else f"; the caption says about {number[0]} GB"
            return [PrintedFigure(spec.name, what, text, f"{value:.3f} x 1000 MiB", verdict, how)]
        return [compare(spec.name, what, text, value, "x 1000 MiB", how)]
    capacity, full = effective_capacities(spec, CONDENSED), all_scales(spec)
    unit = thousands(1, spec, batch)
    figures = [_two_class(spec, f"AMS-KV, batch {batch}", text, "x 1000 MiB", lambda tokens: tokens * unit)]
    if saving is not None:
        what = f"AMS-KV, batch {batch}, saving"
        figures.append(_two_class(spec, what, saving, "%", lambda tokens: 100 * (1 - tokens / full)))
    if batch == 25:  # the only table that another whole split gives
        tokens = spec.heads * (20 * capacity[1] + 16 * sum(spec.lengths[:7]))
        what, how = (
            f"AMS-KV, batch {batch}",
            "20 layers at C_max, 16 stuck with scales 1 to 7; not in the text",
        )
        figures.append(compare(spec.name, what, text, tokens * unit, "x 1000 MiB", how, "under one reading"))
    return figures


def _two_class(
    spec: ModelSpec, what: str, text: str, unit: str, measure: Callable[[float], float]
) -> PrintedFigure:
    """Compare a compressed cache with both whole numbers of demanding layers nearest to the real number it implies."""
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
    ours = ", ".join(f"{value:.3f} at {n}" for n, value in near) + " layers"
    verdict: Verdict = "reproduced" if hits else "not derivable"
    return PrintedFigure(spec.name, what, f"{text} {unit}", ours, verdict, how)


def _compare_text(specs: Specs) -> list[PrintedFigure]:
    figures: list[PrintedFigure] = []
    text = find("ams_kv_text").models
    if "var_d30" in specs:
        spec, printed = specs["var_d30"], str(text["var_d30 (largest saving)"][0].cells["saving %"])
        least = spec.leading_tokens(CONDENSED) + spec.lengths[-4]
        capacity = least, effective_capacities(spec, CONDENSED)[1]
        tokens = two_class_tokens(spec, spec.layers // 6, capacity)
        value = 100 * (1 - tokens / all_scales(spec))
        how = f"a sixth of the layers at {capacity[1]}, the others at {capacity[0]} tokens, a scale less than C_min"
        figures.append(compare(spec.name, "abstract, saving", printed, value, "%", how, "under one reading"))
    if "infinity_2b" in specs:
        spec, rows = specs["infinity_2b"], text["infinity_2b"]
        full, less = (Decimal(str(row.cells["memory GB"])) for row in rows)
        tokens = two_class_tokens(spec, 28, effective_capacities(spec, CONDENSED))
        value = paper_mib(all_scales(spec) - tokens, spec, 2) / 1024
        how = "2 prompts in GiB, 28 demanding layers of 32, last scale counted; batch and unit are not stated"
        saved = f"{full} - {less} = {full - less} GB"
        figures.append(
            PrintedFigure(spec.name, "memory saved", saved, f"{value:.3f} GiB", "under one reading", how)
        )
        share = float(100 * (full - less) / full)
        what, how = "memory saved, share", f"({full} - {less}) / {full}; the text's own numbers disagree"
        figures.append(compare(spec.name, what, str(rows[1].cells["saving %"]), share, "%", how))
    return figures
