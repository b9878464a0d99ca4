"""Hard-KV's merging: a slow reference over runs, what the authors' program makes of keys and values, and lse."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.hardkv.merging import MergePlan, merge_fixed_budget, merge_multi_to_one
from kvbench.methods.hardkv.method import HardKV, Merge, Select
from kvbench.methods.shared.view import View
from tests.support.engine import close, note_calls, open_cache, run, tokens_of, watch
from tests.support.goldens import load_golden

SCALE = 8**-0.5
SPEC = ModelSpec("text", 2, 2, 8, next_token(10, [16, 16, 16, 4]), branches=1, logit_scale=SCALE)
ASKS, LATEST, KERNEL = 6, 5, 3
MERGES: tuple[Merge, ...] = ("none", "fixed", "multi", "exact")
Inputs = Sequence[Sequence[tuple[Tensor, ...]]]


class Head(NamedTuple):
    """What one KV head of one sequence holds: by slot position, key, value and bias."""

    positions: list[int]
    keys: Tensor
    values: Tensor
    bias: Tensor


def score(q: Tensor, head: Head, end: int) -> Tensor:
    """Scores of the last tokens' queries [query heads, n, 8] over a head's slots, up to the token itself."""
    scores = SCALE * q @ head.keys.T + head.bias
    asking = torch.arange(end - q.shape[1], end)
    return scores.masked_fill(torch.tensor(head.positions) > asking[:, None], -torch.inf)


def merge_slowly(
    merge: Merge, head: Head, kept: list[int], worth: dict[int, float], q: Tensor, end: int
) -> Head:
    """What the head holds after a drop: loops over pairs of slots; the window takes nothing."""
    scores = score(q[:, -ASKS:], head, end)
    weights = scores.softmax(-1).mean((0, 1)) if merge == "exact" else scores.amax(0).softmax(-1).mean(0)
    mass = dict(zip(head.positions, weights.tolist(), strict=True))
    at = {position: slot for slot, position in enumerate(head.positions)}
    leaves = sorted(set(head.positions) - set(kept), key=lambda position: worth[position])
    takes = sorted(kept[: max(0, len(kept) - LATEST)], key=lambda position: -mass[position])
    keys, values, bias = head.keys.clone(), head.values.clone(), head.bias.clone()
    if merge in ("fixed", "exact"):
        for into, out in zip(takes, leaves[max(0, len(leaves) - len(takes)) :], strict=False):
            a, b, i, j = mass[into], mass[out], at[into], at[out]
            values[i] = (a * head.values[i] + b * head.values[j]) / (a + b)
            if merge == "fixed":
                keys[i] = (a * head.keys[i] + b * head.keys[j]) / (a + b)
            else:
                heavy = i if a >= b else j
                keys[i] = head.keys[heavy]
                bias[i] = head.bias[heavy] + torch.tensor((a + b) / max(a, b)).log()
    if merge == "multi" and takes and leaves:
        best = max(sorted(takes), key=lambda position: worth[position])  # pooled scores tie
        slots = [at[position] for position in (best, *leaves)]
        shares = weights[slots] / weights[slots].sum()
        keys[at[best]], values[at[best]] = shares @ head.keys[slots], shares @ head.values[slots]
    chosen = [at[position] for position in kept]
    return Head(kept, keys[chosen], values[chosen], bias[chosen])


Lse = dict[tuple[int, int], list[tuple[float, float]]]
"""By sequence and segment: of every head, log-sum-exp before and after what left."""


def replay(
    inputs: Inputs,
    asked: dict[tuple[int, int], list[list[int]]],
    worths: dict[tuple[int, int], list[dict[int, float]]],
    merge: Merge,
) -> tuple[list[Tensor], float, Lse]:
    """What attention gives over slots that are stored one by one, the mean change of lse in a drop, and all lse.

    By layer and segment: positions that each row kept, and its scores by position.
    """
    sequences = len(inputs[0][0][0])
    heads = {
        (layer, row): Head([], torch.empty(0, 8), torch.empty(0, 8), torch.empty(0))
        for layer in range(SPEC.layers)
        for row in range(sequences * SPEC.heads)
    }
    out, changes, noted = [], [], Lse()
    for at, layers in zip(SPEC.segments, inputs, strict=True):
        for layer, (q, k, v) in enumerate(layers):
            found = torch.empty_like(q)
            for row in range(sequences * SPEC.heads):
                sequence, number = divmod(row, SPEC.heads)
                mine = q[sequence, 2 * number : 2 * number + 2]
                before = heads[layer, row]
                head = Head(
                    [*before.positions, *range(at.start, at.end)],
                    torch.cat((before.keys, k[sequence, number])),
                    torch.cat((before.values, v[sequence, number])),
                    torch.cat((before.bias, torch.zeros(at.length))),
                )
                found[sequence, 2 * number : 2 * number + 2] = (
                    score(mine, head, at.end).softmax(-1) @ head.values
                )
                if at.last:
                    continue
                kept = asked[layer, at.index][row]
                after, lse = head, [score(mine[:, -ASKS:], head, at.end).logsumexp(-1)] * 2
                if len(kept) < len(head.positions):
                    after = merge_slowly(merge, head, kept, worths[layer, at.index][row], mine, at.end)
                    lse = [score(mine[:, -ASKS:], one, at.end).logsumexp(-1) for one in (head, after)]
                    changes.append(float((lse[1] - lse[0]).mean()))
                noted.setdefault((sequence, at.index), []).append(
                    (float(lse[0].mean()), float(lse[1].mean()))
                )
                heads[layer, row] = after
            out.append(found)
    return out, sum(changes) / len(changes), noted


@pytest.mark.parametrize(("select", "budget"), [("top_p", 40), ("top_p", 14), ("top_k", 14)])
@pytest.mark.parametrize("merge", MERGES)
def test_attention_is_over_what_was_merged(merge: Merge, budget: float, select: Select) -> None:
    """At the smaller budget more leave than may take."""
    inputs, usual = tokens_of(SPEC, 2, groups=2), {"queries": ASKS, "window": LATEST, "kernel": KERNEL}
    method = HardKV(**usual, select=select, merge=merge, watch_lse=True, start=0.3)
    scored = note_calls(method, "score")
    cache, asked, out = watch(method, SPEC, inputs, budget)
    worth = {}
    for view, scores in scored:
        rows = zip(view.position.tolist(), scores.tolist(), strict=True)
        worth[view.layer, view.segment.index] = [dict(zip(*row, strict=True)) for row in rows]
    expected, drift, noted = replay(inputs, {one[:2]: one.ids() for one in asked}, worth, merge)
    close(out, expected)
    for sequence in range(2):
        steps = cache.ledger.trace(SPEC, sequence)
        assert [step.tokens for step in steps] == list(SPEC.ends[:-1])
        for index, step in enumerate(steps):
            pairs = noted[sequence, index]
            before, after = (sum(part) / len(pairs) for part in zip(*pairs, strict=True))
            assert (step.lse, step.kept_lse) == (
                pytest.approx(before, abs=1e-4),
                pytest.approx(after, abs=1e-4),
            )
    assert cache.ledger.lse_drift == pytest.approx(drift, rel=1e-4, abs=1e-6)
    assert cache.ledger.peak_tokens <= method.budget.capacity


@pytest.mark.parametrize("merge", MERGES[1:])
def test_prompts_of_unequal_length_merge_what_they_have(merge: Merge) -> None:
    """Padding is nobody's: what stands in it changes nothing, and what is noted is a number."""
    outs, drifts = [], []
    for seed in (1, 2):
        inputs = tokens_of(SPEC, 2, groups=2)
        other = tokens_of(SPEC, 2, seed=seed, groups=2)
        for layer in range(SPEC.layers):
            for mine, foreign in zip(inputs[0][layer], other[0][layer], strict=True):
                mine[1, :, :7] = foreign[1, :, :7]
        method = HardKV(queries=ASKS, window=LATEST, kernel=KERNEL, merge=merge, watch_lse=True, start=0.3)
        cache = open_cache(method, SPEC, 20)
        outs.append(run(cache, inputs, [0, 7])[SPEC.layers :])
        drifts.append(cache.ledger.lse_drift)
    close(*outs)
    assert all(out.isfinite().all() for out in outs[0])
    assert drifts[0] == pytest.approx(drifts[1])


def test_a_bias_is_refused_of_methods_without_one() -> None:
    class Wrong(HardKV):
        def keep(self, view: View) -> Tensor | None:
            keys = view.cached_keys()
            view.replace(keys, view.cached_values(), torch.zeros(keys.shape[:2]))
            return None

    cache = open_cache(Wrong(), SPEC, 20)
    with pytest.raises(ValueError, match="`bias` must be given exactly if `uses` has `bias`"):
        run(cache, tokens_of(SPEC, 1))


TOPK = 120
GOLDEN_HEADS = 2
GOLDEN = load_golden("hardinfer_base", "hardinfer_merge")
"""Two heads of the program's; keys and queries are those of `hardinfer_base`."""


def lse_of(keys: Tensor) -> Tensor:
    """Log-sum-exp of the golden's queries, [heads, group, queries]."""
    queries = GOLDEN["Q"][0].view(-1, 2, 8, 16)[:GOLDEN_HEADS]
    return (queries @ keys[:, None].mT / 4).logsumexp(-1)


@pytest.mark.parametrize(("merge", "taking"), [(merge_fixed_budget, 160 - TOPK), (merge_multi_to_one, 1)])
def test_merging_is_the_programs(merge: Callable[..., tuple[Tensor, Tensor]], taking: int) -> None:
    """One budget's list has what was left untouched by time, then what was merged by mass; the other's is turned."""
    score, before = GOLDEN["score"], GOLDEN["K"][0, :GOLDEN_HEADS]
    order = score.argsort(1, descending=True)
    leaves = torch.zeros_like(score, dtype=torch.bool).scatter_(1, order[:, TOPK:], value=True)
    plan = MergePlan(score, score, leaves, ~leaves)
    keys, values = merge(before, GOLDEN["V"], plan)
    lists = [order[:, taking:TOPK].sort(1).values, order[:, :taking]]
    slots = torch.cat(lists if merge is merge_fixed_budget else lists[::-1], 1)[..., None].expand(-1, -1, 16)
    for found, name in ((keys, "K"), (values, "V")):
        expected = GOLDEN[f"{merge.__name__}.{name}"]
        torch.testing.assert_close(found.gather(1, slots), expected, atol=1e-6, rtol=1e-5)
    stays = keys.gather(1, order[:, :TOPK, None].expand(-1, -1, 16))
    torch.testing.assert_close(lse_of(stays), GOLDEN[f"{merge.__name__}.lse_after"])
    torch.testing.assert_close(lse_of(before), GOLDEN["lse_full"])
    for new, old in zip(
        merge(before, GOLDEN["V"], plan._replace(mass=0 * score)), (before, GOLDEN["V"]), strict=True
    ):
        assert torch.equal(new, old)  # slots without mass change nothing
