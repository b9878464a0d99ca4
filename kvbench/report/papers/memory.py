"""Memory columns of the papers worked out from shapes, and why some of them cannot be.

HeatKV (arXiv:2605.14877) counts what is cached before the last scale, in MiB. AMS-KV (arXiv:2511.16047) counts all
scales and writes GB for 1000 MiB. Both hold fp32 keys and 16-bit values, for both branches of guidance. HeadKV's table
is in `headkv_memory`, those of HACK++ in `hackpp_costs`.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from math import floor

from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import MIB, paper_mib
from kvbench.methods.ams_kv import effective_capacities
from kvbench.report.papers.hackpp_costs import hackpp_table1, hackpp_table2
from kvbench.report.papers.headkv_memory import headkv_table4
from kvbench.report.papers.printed import Claim, Specs, Verdict, compare, prints_as, rounding_interval
from kvbench.report.papers.published import PublishedTable, find, model_of

HEATKV_TOKENS = {"0.2": 1300, "0.1": 650, "0.04": 265}
"""Tokens per head that HeatKV's Table 1 counts under each nominal budget; 650 is ScaleKV's own number."""
AMS_BATCH = 50
"""Batch of AMS-KV's Table 3 where its label names no other."""
CONDENSED = 2
"""AMS-KV's condensed scales. Its capacities are those of `effective_capacities`: counting the last scale among the last
two would need 26 % of the cache of VAR-d30 at the least, where Table 3 reports 21 %."""
EQ4_BYTES, FITTING_BYTES = 16, 12
"""Factor B x H x D that AMS-KV's Eq. 4 prints, and the one that gives its tables: two branches of 4 + 2 bytes."""


def all_scales(spec: ModelSpec) -> int:
    """Tokens one sequence holds when the last scale is cached too, T x c_K, as AMS-KV counts the full cache."""
    return spec.all_heads * spec.segments[-1].end


def two_class_tokens(spec: ModelSpec, demanding: int, capacity: tuple[int, int]) -> int:
    """Tokens one sequence holds with N_CD layers at C_max and the others at C_min (AMS-KV Eq. 4)."""
    low, high = capacity
    return spec.heads * (demanding * high + (spec.layers - demanding) * low)


def implied_layers(tokens: float, spec: ModelSpec, capacity: tuple[int, int]) -> float:
    """N_CD, a real number, at which `two_class_tokens` gives that many tokens."""
    low, high = capacity
    return (tokens / spec.heads - spec.layers * low) / (high - low)


def eq4_mib(tokens: int, spec: ModelSpec, batch: int, factor: int = EQ4_BYTES) -> float:
    """AMS-KV Eq. 4: MiB of some tokens of every sequence, factor x B x D x tokens / 1024^2 (heads are in `tokens`)."""
    return factor * batch * spec.head_dim * tokens / MIB


def thousands(tokens: float, spec: ModelSpec, batch: int) -> float:
    """AMS-KV's GB: thousands of MiB."""
    return paper_mib(tokens, spec, batch) / 1000


def heatkv_table1(specs: Specs) -> list[Claim]:
    """HeatKV Table 1, batch 8: every cell follows from 1300, 650 and 265 tokens per head."""
    table, claims = find("heatkv_table1"), []
    for name, rows in table.models.items():
        if name not in specs:
            continue
        spec = specs[name]
        printed = {row.where["budget"][0]: str(row.cells["cache MiB"]) for row in rows}
        for budget, text in printed.items():
            tokens = HEATKV_TOKENS.get(budget, spec.cached_length)
            value = paper_mib(tokens * spec.all_heads, spec, 8)
            nominal = paper_mib(float(budget) * spec.full_tokens, spec, 8)
            how = f"{tokens} tokens per head"
            if tokens != spec.cached_length:
                how += f", b = {tokens / spec.cached_length:.4f}; {budget} itself would give {nominal:.0f}"
            claims.append(compare(name, f"budget {budget}", text, value, "MiB", how))
    return claims


def ams_kv_table3(specs: Specs) -> list[Claim]:
    """AMS-KV Table 3: full caches follow; no whole number of demanding layers gives the compressed ones."""
    table, claims = find("ams_kv_table3"), []
    for label, rows in table.models.items():
        name, size = model_of(label), re.search(r"batch (\d+)", label)
        batch = int(size[1]) if size else AMS_BATCH
        if name not in specs or "CFG" in label:  # the same memory under other sampling
            continue
        for row in rows:
            text = str(row.cells["cache 1000 MiB"])
            claims += _ams_row(specs[name], row.where["method"][0], batch, text, row.cells["saving %"])
    return claims


def ams_kv_table6(specs: Specs) -> list[Claim]:
    """AMS-KV Table 6: full caches follow; the others need yet another number of demanding layers than Table 3."""
    claims: list[Claim] = []
    for name, rows in find("ams_kv_table6").models.items():
        for row in rows if name in specs else ():
            text, batch = str(row.cells["cache 1000 MiB"]), int(row.where["latency.batch"][0])
            claims += _ams_row(specs[name], row.where["method"][0], batch, text, None)
    return claims


def ams_kv_eq4(specs: Specs) -> list[Claim]:
    """AMS-KV Eq. 4 and the figures of the text: what its factor gives, and readings under which the others come out."""
    claims: list[Claim] = []
    full = {
        label: str(rows[0].cells["cache 1000 MiB"]) for label, rows in find("ams_kv_table3").models.items()
    }
    for label, batch in (("var_d30", 50), ("var_d36 (batch 25)", 25)):
        name = model_of(label)
        for factor in (EQ4_BYTES, FITTING_BYTES) if name in specs else ():
            value = eq4_mib(all_scales(specs[name]), specs[name], batch, factor) / 1000
            how = f"Eq. 4 prints the factor {EQ4_BYTES}: fp32 keys and values"
            if factor == FITTING_BYTES:
                how = f"the factor {FITTING_BYTES}: fp32 keys, 16-bit values"
            what = f"full cache, batch {batch}, factor {factor}"
            claims.append(compare(name, what, full[label], value, "x 1000 MiB", how))
    return claims + _text_claims(specs)


TABLES: Mapping[str, Callable[[Specs], list[Claim]]] = {
    "heatkv_table1": heatkv_table1,
    "ams_kv_table3": ams_kv_table3,
    "ams_kv_table6": ams_kv_table6,
    "ams_kv_eq4": ams_kv_eq4,
    "headkv_table4": headkv_table4,
    "hackpp_table1": hackpp_table1,
    "hackpp_table2": hackpp_table2,
}
"""Accepted values of `plan.table`."""


def sources(name: str) -> list[PublishedTable]:
    """Published tables that a memory table draws on."""
    return [find(part) for part in (("ams_kv_table3", "ams_kv_text") if name == "ams_kv_eq4" else (name,))]


def models(name: str) -> tuple[str, ...]:
    """Models whose shapes a memory table needs."""
    return tuple(dict.fromkeys(model_of(label) for table in sources(name) for label in table.models))


def _ams_row(spec: ModelSpec, method: str, batch: int, text: str, saving: str | None) -> list[Claim]:
    found = re.search(r"\d[\d.]*", text)
    if method == "full":
        value = thousands(all_scales(spec), spec, batch)
        how = f"all {len(spec.segments)} scales counted"
        what = f"full, batch {batch}"
        if found is None or not text[0].isdigit():
            verdict: Verdict = "no number printed" if found is None else "not derivable"
            how += "" if found is None else f"; the caption says about {found[0]} GB"
            return [Claim(spec.name, what, text, f"{value:.3f} x 1000 MiB", verdict, how)]
        return [compare(spec.name, what, text, value, "x 1000 MiB", how)]
    capacity, full = effective_capacities(spec, CONDENSED), all_scales(spec)
    unit = thousands(1, spec, batch)
    claims = [_two_class(spec, f"AMS-KV, batch {batch}", text, "x 1000 MiB", lambda tokens: tokens * unit)]
    if saving is not None:
        what = f"AMS-KV, batch {batch}, saving"
        claims.append(_two_class(spec, what, saving, "%", lambda tokens: 100 * (1 - tokens / full)))
    if batch == 25:  # the one table whose number another whole split gives
        tokens = spec.heads * (20 * capacity[1] + 16 * sum(spec.lengths[:7]))
        what, how = (
            f"AMS-KV, batch {batch}",
            "20 layers at C_max, 16 stuck with scales 1 to 7; not in the text",
        )
        claims.append(compare(spec.name, what, text, tokens * unit, "x 1000 MiB", how, "under one reading"))
    return claims


def _two_class(spec: ModelSpec, what: str, text: str, unit: str, measure: Callable[[float], float]) -> Claim:
    """A compressed figure: the neighbouring whole numbers of demanding layers, and the real one it would take."""
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
    return Claim(spec.name, what, f"{text} {unit}", ours, "reproduced" if hits else "not derivable", how)


def _text_claims(specs: Specs) -> list[Claim]:
    claims: list[Claim] = []
    text = find("ams_kv_text").models
    if "var_d30" in specs:
        spec, printed = specs["var_d30"], str(text["var_d30 (largest saving)"][0].cells["saving %"])
        capacity = (
            spec.leading_tokens(CONDENSED) + spec.lengths[-4],
            effective_capacities(spec, CONDENSED)[1],
        )
        held = two_class_tokens(spec, spec.layers // 6, capacity)
        value = 100 * (1 - held / all_scales(spec))
        how = f"a sixth of the layers at {capacity[1]}, the others at {capacity[0]} tokens, a scale less than C_min"
        claims.append(compare(spec.name, "abstract, saving", printed, value, "%", how, "under one reading"))
    if "infinity_2b" in specs:
        spec, rows = specs["infinity_2b"], text["infinity_2b"]
        full, less = (Decimal(str(row.cells["memory GB"])) for row in rows)
        held = two_class_tokens(spec, 28, effective_capacities(spec, CONDENSED))
        value = paper_mib(all_scales(spec) - held, spec, 2) / 1024
        how = "2 prompts in GiB, 28 demanding layers of 32, last scale counted; batch and unit are not stated"
        saved = f"{full} - {less} = {full - less} GB"
        claims.append(Claim(spec.name, "memory saved", saved, f"{value:.3f} GiB", "under one reading", how))
        share = float(100 * (full - less) / full)
        what, how = "memory saved, share", f"({full} - {less}) / {full}; the text's own numbers disagree"
        claims.append(compare(spec.name, what, str(rows[1].cells["saving %"]), share, "%", how))
    return claims
