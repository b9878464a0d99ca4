"""Scores from contents, chunks and CriticalKV, against kvpress."""

import pytest
import torch

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.chunkkv import rank_chunks
from kvbench.methods.contents.compactor import attend_unmasked, measure_leverage, standardise
from kvbench.methods.contents.lagkv import LagKV, compare_chunks
from kvbench.methods.contents.norms import weigh_norms
from kvbench.methods.critical import choose_critical
from kvbench.methods.shared.grouped import choose_among_heads
from kvbench.methods.shared.select import choose_best
from tests.support.engine import D, tokens_of, watch
from tests.support.evict_goldens import close_score, list_cases, load_case, load_parameters, mark

KINDS = dict(zip(list_cases("others"), (p["kind"] for p in load_parameters("others")), strict=True))


def cases_of(kind: str) -> list[int]:
    return [number for number, own in KINDS.items() if own == kind]


@pytest.mark.parametrize("case", cases_of("lagkv"))
def test_lagkv_of_kvpress(case: int) -> None:
    p, g = load_case("others", case)
    keys, values, expected = (g[x].flatten(0, 1) for x in ("keys", "values", "score"))
    slot = torch.arange(p["N"]).expand(len(keys), -1)
    if p["N"] < p["n_sink"] + 2 * p["lag"]:
        newest = choose_best(expected, p["N"] // 2)
        assert torch.equal(
            newest[:, p["n_sink"] :], choose_best(slot.float(), p["N"] // 2 - p["n_sink"])[:, p["n_sink"] :]
        )
        return
    parts = ((slot - p["n_sink"]).div(p["lag"], rounding_mode="floor")).clamp(min=-1)
    whole = (p["N"] - p["n_sink"]) // p["lag"] - 1
    close_score(compare_chunks(keys, values, parts, whole, ranks=not p["cross"]), expected)


@pytest.mark.parametrize("case", cases_of("cur"))
def test_cur_of_kvpress(case: int) -> None:
    p, g = load_case("others", case)
    keys, values, expected = (g[x].flatten(0, 1) for x in ("keys", "values", "score"))
    exists = torch.ones_like(expected, dtype=torch.bool)
    found = weigh_norms(keys, values, exists, p["type"], p["window"] if p["local"] else 0)
    close_score(found[:, p["sinks"] :], expected[:, p["sinks"] :])


@pytest.mark.parametrize("case", cases_of("compactor"))
def test_compactor_of_kvpress(case: int) -> None:
    """Leverage and attention without a mask, alone over all slots; together over those between the ends."""
    p, g = load_case("others", case)
    x = {name: g[name].flatten(0, 1) for name in ("keys", "values", "keys_prerope")}
    x["queries"] = g["queries"].unflatten(1, (p["Hk"], -1)).flatten(0, 1)
    exists = torch.ones(x["keys"].shape[:2], dtype=torch.bool)
    every = len(exists)  # the program's mean is one over the batch
    leverage = standardise(
        measure_leverage(x["keys_prerope"], exists, g["sketch"].flatten(0, 1)), exists, every
    )
    assert (leverage - g["leverage_score"].flatten(0, 1)).abs().max() < 1e-4
    inputs = x["queries"], x["keys"], x["values"]
    received = attend_unmasked(*inputs, exists, p["chunk"], official_padding=True)
    assert (standardise(received, exists, every) - g["noncausal_score"].flatten(0, 1)).abs().max() < 1e-4
    part = slice(p["start"], p["N"] - p["end"])
    short = exists[:, part]
    queries, keys, values = x["queries"][:, :, part], x["keys"][:, part], x["values"][:, part]
    received = attend_unmasked(queries, keys, values, short, p["chunk"], official_padding=True)
    sketch = g["compactor_sketch"].flatten(0, 1)
    leverage = standardise(measure_leverage(x["keys_prerope"][:, part], short, sketch), short, every)
    both = p["ratio"] * leverage + standardise(received, short, every)
    assert (both - g["compactor_score"].flatten(0, 1)[:, part]).abs().max() < 1e-4


@pytest.mark.parametrize("case", cases_of("chunkkv"))
def test_chunks_of_kvpress(case: int) -> None:
    """The program takes the chunks of the batch's first sequence; here each has its own."""
    p, g = load_case("others", case)
    position = torch.arange(p["N"]).expand(p["H"], -1)
    kept = g["kept"][0]
    ranks = rank_chunks(g["score"][0], position, position // p["chunk"], p["H"], p["N"])
    assert torch.equal(choose_best(ranks, kept.shape[-1]), mark(kept, p["N"]))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    ("leading", "budget", "kept"), [(0, 2, [14, 15]), (0, 3, [13, 14, 15]), (1, 4, [0, 14, 15, 16])]
)
def test_the_newest_tokens_of_an_unscored_part_stay(
    leading: int, budget: int, kept: list[int], *, cross: bool
) -> None:
    """After the leading tokens come four parts of 4 tokens; the last has no next one and exceeds the budget."""
    spec = ModelSpec("text", 1, 2, D, next_token(16 + leading, [3, 2]), 1)
    method = LagKV(lag=4, leading=leading, cross_scoring=cross)
    assert watch(method, spec, tokens_of(spec, 2), budget).asked[0].ids() == [kept] * 4


@pytest.mark.parametrize("case", list_cases("critical"))
def test_critical_of_kvpress(case: int) -> None:
    p, g = load_case("critical", case)
    score, norms = g["score"].flatten(0, 1), g["value_norm"].flatten(0, 1)
    count = torch.full((len(score),), p["n_kept"])
    kept = choose_critical(score, norms, count, p["first"], epsilon=p["eps"])
    assert torch.equal(kept, mark(g["critical_kept"].flatten(0, 1), p["N"]))
    second = g["critical_score"].flatten(0, 1)
    close_score(((score + p["eps"]) * norms)[second < 1e30], second[second < 1e30])
    if p["B"] == 1:
        even = choose_among_heads(score, p["n_kept"], p["Hk"], p["alpha"])
        assert torch.equal(even, g["ada_keep"][0])
        safe = torch.tensor(int(p["alpha"] * p["n_kept"]))
        kept = choose_critical(score, norms, even.sum(1), p["first"], epsilon=p["eps"], safe=safe)
        assert torch.equal(kept, g["critical_ada_keep"][0])
