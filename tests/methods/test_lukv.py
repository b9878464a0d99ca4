"""LU-KV: its authors' calibration, kvpress's rounding, and what a run holds."""

from itertools import product

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.h2o import H2O
from kvbench.methods.lukv.calibration import BudgetShares, list_contexts
from kvbench.methods.lukv.shares import (
    average_curves,
    discard,
    find_marginal_losses,
    interpolate_shares,
    round_shares,
    sum_percents,
)
from kvbench.methods.shared.capacities import Floats
from kvbench.methods.shared.full_scores import list_capacities
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.utility import combine_utility
from tests.support.engine import open_cache, tokens_of
from tests.support.goldens import load_golden
from tests.support.layer_outputs import (
    FOLD,
    SCALES,
    TEXTS,
    Inputs,
    attention,
    both,
    observe,
    project,
    projections,
)

CASES = {"case0": (2, 4, 1), "case1": (3, 4, 8), "case2": (1, 0, 1)}  # pairs, sink, window
PRESSES = {"case3": (0, 0.5), "case4": (1, 0.8), "case5": (0, 0.93)}  # layer, ratio; sink 4, window 1


@pytest.mark.parametrize("case", CASES)
def test_tables_are_those_of_the_authors_program(case: str) -> None:
    golden = {k.removeprefix(f"{case}."): x for k, x in load_golden("nm_lukv").items()}
    pairs, sink, window = CASES[case]
    values = golden["values"]  # [L, H, N, D]
    layers, heads, tokens, channels = values.shape
    of_heads = golden["output_projection"].unflatten(2, (heads, -1, channels))
    norms = torch.einsum("lwhgd,lhnd->lhgnw", of_heads, values).norm(dim=-1)
    received = golden["attention"].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [L, H, group, steps, N]
    for layer in range(layers):
        found = combine_utility(received[layer], norms[layer], heads)
        torch.testing.assert_close(found, golden["utility.0"][layer], rtol=1e-4, atol=0)
    tables: dict[str, list[Floats]] = {"global": [], "layer": []}
    for pair in range(pairs):
        inner = slice(sink, tokens - window)
        order = golden[f"score.{pair}"][..., inner].argsort(dim=-1, stable=True)
        aligned = golden[f"utility.{pair}"][..., inner].gather(-1, order).double().numpy()
        losses = find_marginal_losses(aligned)
        if not pair:
            np.testing.assert_allclose(aligned[..., ::-1], golden["aligned.0"], rtol=1e-4)
            np.testing.assert_allclose(losses[..., ::-1], golden["hull.0"], rtol=1e-4)
        most = tokens - max(round(0.01 * tokens), sink + window)
        for scope in ("global", "layer"):
            tables[scope].append(discard(losses[..., :most], tokens, scope))
    np.testing.assert_allclose(np.mean(tables["global"], 0), golden["pruned.global"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.mean(tables["layer"], 0), golden["pruned.per_layer"], rtol=0, atol=1e-9)


def test_what_bounds_take_and_leave_goes_to_those_that_lack_most() -> None:
    reach = np.array([3, 9, 9, 9])
    assert round_shares(np.array([8.0, 4.5, 1.5, 0.0]), 14, 0, reach).tolist() == [3, 6, 3, 2]
    assert round_shares(np.array([3.0, 6.0, 0.0, 0.0]), 9, 2, reach).tolist() == [2, 3, 2, 2]


@pytest.mark.parametrize("case", PRESSES)
def test_a_row_of_the_table_keeps_what_kvpress_keeps(case: str) -> None:
    golden = load_golden("nm_lukv")
    scores, layer, ratio = golden[f"{case}.scores"].clone(), *PRESSES[case]
    sequences, heads, tokens = scores.shape
    kept = (1 - interpolate_shares(golden[f"{case}.pruned"].numpy(), ratio)[layer]) * tokens
    reach, total = np.full(heads, tokens), round(kept.sum())
    capacity = torch.from_numpy(round_shares(kept, total, 1, reach))
    scores[..., :4] = scores[..., -1:] = torch.inf
    found = choose_best(scores.flatten(0, 1), capacity.repeat(sequences)).view_as(scores)
    assert torch.equal(found, golden[f"{case}.keep"].bool())


def shares_by_loops(spec: ModelSpec, inputs: Inputs, contexts: dict[int, int]) -> list[Floats]:
    """The table of each context and sequence under H2O, from attention written out."""
    received: dict[tuple[int, int, int], Tensor] = {}
    order: dict[tuple[int, int, int, int], list[int]] = {}
    utility: dict[tuple[int, int, int, int], Tensor] = {}
    for k, layer in np.ndindex(len(inputs), spec.layers):
        at, rows = spec.segments[k], list(attention(spec, inputs, layer, k))
        for sequence, head, p, v in rows:
            for start in (start for start, end in contexts.items() if start < k <= end):
                end = spec.ends[start]
                whole = sum(
                    project(other[None, :end], spec, layer, number).norm(dim=-1).sum()
                    for one, number, _, other in rows
                    if one == sequence
                )
                lengths = project(v[None, :end], spec, layer, head).norm(dim=-1)
                found = (p[..., :end].amax(1) * lengths / whole).amax(0)
                key = (start, sequence, layer, head)
                utility[key] = torch.maximum(utility.get(key, found), found)
            row = (sequence, layer, head)
            before = received.get(row, torch.zeros(0).double())
            received[row] = torch.cat((before, torch.zeros(at.length))) + p.mean(0).sum(0)
            if k in contexts:
                places = []
                for capacity in list_capacities(spec):
                    worth = received[row].clone()
                    worth[at.end - max(capacity, 1) // 2 :] = torch.inf
                    ranked = sorted(range(at.end), key=lambda j, worth=worth: (-worth[j].item(), j))
                    places.append([(capacity, ranked.index(j)) for j in range(at.end)])
                need = [min(c for c in choices if c[1] < c[0]) for choices in zip(*places, strict=True)]
                order[k, *row] = sorted(range(at.end), key=lambda j, need=need: need[j], reverse=True)
    tables = []
    for start, sequence in product(contexts, range(len(inputs[0][0][0]))):
        tokens = spec.ends[start]
        ones = {
            (layer, head): utility[start, sequence, layer, head][
                order[start, sequence, layer, head]
            ].tolist()[:-1]
            for layer, head in np.ndindex(spec.layers, spec.heads)
        }
        if tokens > 1:  # one token a head always stays
            losses = find_marginal_losses(np.array(list(ones.values())).reshape(spec.layers, spec.heads, -1))
            tables.append(discard(losses, tokens, "global").reshape(99, -1))
    return tables


@both
def test_shares_are_those_of_utilities_written_out(spec: ModelSpec) -> None:
    contexts = {1: 3} if spec is SCALES else {0: 1, 1: 3, 3: 5}
    assert list_contexts(spec) == contexts
    batches = [tokens_of(spec, 2 * spec.branches, seed, FOLD) for seed in (0, 1)]
    found = observe(BudgetShares(H2O()), spec, batches)["pruned"]
    expected = np.mean([table for inputs in batches for table in shares_by_loops(spec, inputs, contexts)], 0)
    np.testing.assert_allclose(found.flatten(1), expected, rtol=0, atol=1e-9)


def test_a_text_that_ends_early_counts_with_the_future_that_it_has() -> None:
    inputs = tokens_of(TEXTS, 1, groups=FOLD)
    observer = BudgetShares(H2O())
    cache = open_cache(observer, TEXTS, projection=projections(TEXTS).__getitem__)
    for _ in range(2):
        cache.reset(1)
        for segment, layers in zip(TEXTS.segments[:3], inputs, strict=False):
            cache.begin(segment)
            for layer, qkv in enumerate(layers):
                cache.attend(layer, *qkv)
    tables = shares_by_loops(TEXTS, inputs[:3], {0: 1, 1: 2})
    found = observer.average()["pruned"].flatten(1)
    np.testing.assert_allclose(found, np.mean(tables, 0), rtol=0, atol=1e-9)


def test_shares_are_linear_between_rows_and_curves_give_the_same_table_for_one_prompt(rng: Generator) -> None:
    table = discard(find_marginal_losses(rng.random((1, 2, 100))), 100, "global")
    for ratio, row in ((0.005, table[0] / 2), (0.29, table[28]), (1, 0 * table[0] + 1)):
        np.testing.assert_allclose(interpolate_shares(table, ratio), row, atol=1e-12)
    middle = interpolate_shares(table, 0.4025)
    np.testing.assert_allclose(middle, 0.75 * table[39] + 0.25 * table[40])
    utility = rng.random((1, 2, 100))
    np.testing.assert_allclose(sum_percents(utility), utility)
    np.testing.assert_allclose(sum_percents(utility[..., :50]), utility[..., :50].repeat(2, -1) / 2)
    expected = discard(find_marginal_losses(utility)[..., :90], 100, "global")
    np.testing.assert_array_equal(average_curves(utility, 0.1, "global"), expected)
