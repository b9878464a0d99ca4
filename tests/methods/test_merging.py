"""Merging against what other authors' programs leave, and against a slow reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.methods.merging.cam import add_values, measure_probabilities
from kvbench.methods.merging.merge import How, merge_slots, merge_values, pair_slots, select_ranks
from kvbench.methods.shared.select import choose_best
from tests.support.evict_goldens import list_cases, load_case, mark, take

HOWS: list[How] = ["pivot", "average", "weighted", "normalised"]


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


def merge_slowly(keys: Tensor, values: Tensor, stays: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """One row after the other, slot by slot, in double precision."""
    out = [keys.double().clone(), values.double().clone()]
    for row, marks in enumerate(stays.tolist()):
        kept = [slot for slot, stay in enumerate(marks) if stay]
        taken: dict[int, list[tuple[int, float]]] = {slot: [] for slot in kept}
        for slot, stay in enumerate(marks):
            if not stay and kept:
                cosines = [torch.cosine_similarity(keys[row, slot], keys[row, c], dim=0).item() for c in kept]
                best = max(range(len(kept)), key=cosines.__getitem__)
                taken[kept[best]].append((slot, cosines[best]))
        for slot, sources in taken.items():
            for x, result in zip((keys, values), out, strict=True):
                own, given_ones = x[row, slot].double(), [(x[row, e].double(), w) for e, w in sources]
                weights = [max((w + 1) / 2, 1e-6) for _, w in given_ones]
                sums = {
                    "pivot": [(e + own) / 2 for e, _ in given_ones],
                    "average": [e for e, _ in given_ones],
                    "weighted": [e * w for e, w in given_ones],
                    "normalised": [e * u for (e, _), u in zip(given_ones, weights, strict=True)],
                }[how]
                count = sum(weights) if how == "normalised" else len(sources)
                result[row, slot] = (own + sum(sums)) / (1 + count)
    return out[0], out[1]


@given(st.integers(0, 10**6), st.sampled_from(HOWS), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_merging_is_what_a_loop_does(seed: int, how: How, slots: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 3, slots, 4, generator=generator).unbind(0)
    stays = torch.rand(3, slots, generator=generator) < 0.5
    pairs = pair_slots(keys, ~stays, stays)
    found = merge_slots(keys, values, pairs, pairs.leaves, how)
    for one, expected in zip(found, merge_slowly(keys, values, stays, how), strict=True):
        torch.testing.assert_close(one[stays], expected.float()[stays], atol=1e-5, rtol=1e-5)
    if stays.all(1).any():
        full = stays.all(1)
        assert torch.equal(found[0][full], keys[full])


@pytest.mark.parametrize("how", HOWS)
def test_a_slot_that_takes_its_twin_in_is_unchanged(how: How) -> None:
    keys = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    keys[:, 1] = keys[:, 3]
    stays = torch.tensor([True, False, True, True, True]).expand(2, -1)
    pairs = pair_slots(keys, ~stays, stays)
    found, values = merge_slots(keys, 2 * keys, pairs, pairs.leaves, how)
    torch.testing.assert_close(found[stays], keys[stays])
    torch.testing.assert_close(values, 2 * found)
    torch.testing.assert_close(merge_values(keys, pairs, threshold=0, fraction=1)[stays], keys[stays])


@given(st.integers(0, 10**6), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_cam_conserves_the_sum_of_values(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 15, 4, generator=generator)
    stays = torch.rand(2, 15, generator=generator) < 0.5
    stays[:, -1] = True  # no window is empty
    found = add_values(values, (~stays).float(), stays, size)
    sums = [(x * m[..., None]).sum(1) for x, m in ((found, stays), (values, torch.ones_like(stays)))]
    torch.testing.assert_close(*sums, atol=1e-5, rtol=1e-5)
