"""Scores from contents, chunks, CriticalKV and merging against what kvpress and other authors' programs leave."""

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.chunkkv import rank_chunks
from kvbench.methods.contents.compactor import attend_unmasked, measure_leverage, standardise
from kvbench.methods.contents.lagkv import LagKV, compare_chunks
from kvbench.methods.contents.norms import weigh_norms
from kvbench.methods.critical import choose_critical
from kvbench.methods.merging.merge import (
    How,
    add_values,
    measure_probabilities,
    merge_slots,
    merge_values,
    pair_slots,
    select_ranks,
)
from kvbench.methods.shared.grouped import choose_among_heads
from kvbench.methods.shared.select import choose_best
from tests.support.engine import D, tokens_of, watch
from tests.support.goldens import close_score, list_cases, load_case, load_parameters, mark, take


def exact(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-6 if atol == 1e-6 else 3e-5)


@pytest.mark.parametrize("case", list_cases("lookm"))
@pytest.mark.parametrize("text", ["", "text_"])
@pytest.mark.parametrize("how", ["pivot", "average_all", "weighted_all", "average", "weighted"])
def test_merging_of_lookm(case: int, text: str, how: How) -> None:
    """`_all` is the paper's formula, the others without it are the program's filter."""
    _, g = load_case("lookm", case)
    keys, values = g["keys"][0], g["values"][0]
    kept = g["text.kept" if text else "plain.kept"]
    stays = mark(kept, keys.shape[1])
    pairs = pair_slots(keys, ~stays, stays)
    merges = pairs.leaves
    if how in ("average", "weighted"):
        merges, _ = select_ranks(pairs, len(keys))
        assert not torch.equal(merges, pairs.leaves)
    kind = how.removesuffix("_all")
    found = merge_slots(keys, values, pairs, merges, kind, first_sources=how == "average")
    for one, name in zip(found, ("keys", "values"), strict=True):
        exact(take(one, kept), g[f"{text}{how}.{name}"][0])


@pytest.mark.parametrize("case", list_cases("lookm"))
def test_selection_of_lookm(case: int) -> None:
    """The newest stay and the best of the rest: the first four among them, or all text before."""
    p, g = load_case("lookm", case)
    tokens, score = p["N"], g["accumulated_attention"]
    slot = torch.arange(tokens)
    window = slot >= tokens - p["recent"]
    text = torch.ones(tokens, dtype=torch.bool)
    for start in p["images"]:
        text[start : start + p["image_tokens"]] = False
    best = max(p["important"], int((text & ~window).sum()))
    for first, count, name in ((slot < 4, p["important"], "plain.kept"), (text, best, "text.kept")):
        kept = choose_best(score.masked_fill(window | first, torch.inf), count + p["recent"])
        assert torch.equal(kept, mark(g[name], tokens))


@pytest.mark.parametrize("case", list_cases("kvcache_factory_merge"))
@pytest.mark.parametrize(("how", "name"), [("pivot", "pivot"), ("normalised", "weighted")])
def test_merging_of_kvcache_factory(case: int, how: How, name: str) -> None:
    _, g = load_case("kvcache_factory_merge", case)
    keys, values, kept = (g[x].flatten(0, 1) for x in ("keys", "values", "kept"))
    stays = mark(kept, keys.shape[1])
    pairs = pair_slots(keys, ~stays, stays)
    found = merge_slots(keys, values, pairs, pairs.leaves, how)
    for one, what in zip(found, ("keys", "values"), strict=True):
        exact(take(one, kept), g[f"{name}.{what}"].flatten(0, 1))


@pytest.mark.parametrize("case", list_cases("merging"))
def test_merging_of_kvpress(case: int) -> None:
    p, g = load_case("merging", case)
    keys, values, kept, score = (g[x].flatten(0, 1) for x in ("keys", "values", "kept", "score"))
    stays = choose_best(score, p["n_kept"])
    assert torch.equal(stays, mark(kept, keys.shape[1]))
    pairs = pair_slots(keys, ~stays, stays)
    rule = {"threshold": p["threshold"], "fraction": p["fraction"]}
    found = merge_values(values, pairs, **rule, official_quantile=True)
    exact(take(found, kept), g["merged_values"].flatten(0, 1), 3e-5)
    if p["fraction"] == 1:
        assert torch.equal(found, merge_values(values, pairs, **rule))


def test_the_most_similar_of_what_leaves_merge() -> None:
    p, g = load_case("merging", 2)
    keys, values, kept = (g[x].flatten(0, 1) for x in ("keys", "values", "kept"))
    stays = mark(kept, keys.shape[1])
    pairs = pair_slots(keys, ~stays, stays)
    most = pairs.leaves.sum(1)[0].item() / 2
    few = pairs.similarity.masked_fill(stays, -2).topk(int(most), 1)
    alone = mark(few.indices, keys.shape[1])
    found = merge_values(values, pairs, threshold=p["threshold"], fraction=0.5)
    expected = merge_values(values, pairs._replace(leaves=alone), threshold=p["threshold"], fraction=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", list_cases("cam"))
def test_cam_of_kvpress(case: int) -> None:
    p, g = load_case("cam", case)
    mean = g["score"].mean(1)
    stays = choose_best(mean, p["target"])
    assert torch.equal(stays, mark(g["kept"], p["N"]))
    leaving = mean.masked_fill(stays, -torch.inf)
    merged = choose_best(leaving.flip(1), p["interval"]).flip(1) & ~stays
    rows = [x.repeat_interleave(p["H"], 0) for x in (stays, merged)]
    attention = g["accumulated_attention"].flatten(0, 1)
    found = measure_probabilities(attention, rows[1], rows[0], p["merge_budget"])
    exact(found[rows[1]].view_as(g["merge_probability"]), g["merge_probability"], 3e-5)
    weight = torch.zeros_like(attention).masked_scatter(rows[1], g["merge_mask"].float())
    values = add_values(g["values"].flatten(0, 1), weight, rows[0], p["merge_budget"])
    kept = g["kept"].repeat_interleave(p["H"], 0)
    exact(take(values, kept), g["merged_values"].flatten(0, 1), 3e-5)


@pytest.mark.parametrize("case", list_cases("cam_paper"))
def test_cam_of_its_authors(case: int) -> None:
    """One token leaves the recent window; it goes to the 32 slots behind it, in parts of a 32nd."""
    p, g = load_case("cam_paper", case)
    slot = torch.arange(p["N"]).expand(p["H"], -1)
    leaves = slot == p["N"] - p["recent"] + 1
    stays = (slot < p["start"]) | (slot > p["N"] - p["recent"] + 1)
    attention = g["attention"][0, :, 0]
    found = measure_probabilities(attention, leaves, stays, p["recent"])
    exact(found[leaves], g["merge_probability"], 3e-5)
    weight = leaves * g["merge_mask"][:, None].float()
    values = add_values(g["values"][0], weight, stays, 32, divisor=32)
    exact(values, g["merged_values"][0], 3e-5)


@pytest.mark.parametrize("case", list_cases("d2o"))
def test_merging_of_d2o(case: int) -> None:
    """The threshold moves with every step; scores of what stays carry on."""
    p, g = load_case("d2o", case)
    room, threshold = p["important"] + p["recent"], None
    keys, values, score = g["keys"][0], g["values"][0], g["accumulated_attention"]
    now, first = p["N"] + 1, [slice(0, p["N"] + 1)] * 2
    held = [keys[:, first[0]], values[:, first[1]]]
    for step in range(p["steps"]):
        if step:
            held = [
                torch.cat((one, x[:, now : now + 1]), 1) for one, x in zip(held, (keys, values), strict=True)
            ]
            now += 1
            score = torch.cat((score, torch.zeros(len(score), 1)), 1) + g[f"step{step}.attention"]
        slot = torch.arange(score.shape[1]).expand_as(score)
        stays = choose_best(
            score.masked_fill((slot < 4) | (slot >= score.shape[1] - p["recent"]), torch.inf), room
        )
        pairs = pair_slots(held[0], ~stays, stays)
        if threshold is None:
            merges, threshold = select_ranks(pairs, p["H"])
        else:
            _, mean = select_ranks(pairs, p["H"])
            threshold = p["alpha"] * threshold + p["beta"] * mean
            merges, _ = select_ranks(pairs, p["H"], threshold)
        exact(threshold, g[f"step{step}.threshold"])
        held = [x[stays].view(p["H"], room, -1) for x in merge_slots(*held, pairs, merges, "weighted")]
        score = score[stays].view(p["H"], room)
        for one, name in zip(held, ("keys", "values"), strict=True):
            exact(one, g[f"step{step}.{name}"][0])


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


def test_the_newest_tokens_of_an_unscored_part_stay() -> None:
    """After the first token come four parts of 4 tokens; the last has no next one and exceeds the budget."""
    spec = ModelSpec("text", 1, 2, D, next_token(17, [3, 2]), 1)
    assert watch(LagKV(lag=4, leading=1), spec, tokens_of(spec, 2), 4).asked[0].ids() == [[0, 14, 15, 16]] * 4


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
