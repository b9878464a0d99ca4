"""What the released program of Hard-KV selects, against its own masks."""

import pytest
import torch
from torch import Tensor

from kvbench.methods.hardkv.calibration import mark_top_p
from kvbench.methods.hardkv.method import HardKV, Select
from kvbench.methods.hardkv.official import rank_rewritten, select_sparse, weigh_slots
from kvbench.methods.hardkv.selectors import Selector, pool_scores, weigh_redundancy
from kvbench.methods.shared.redundancy import measure_redundancy
from tests.support.engine import tokens_of, watch
from tests.support.goldens import load_golden
from tests.support.hardkv import (
    ASKS,
    KERNEL,
    LATEST,
    MIX,
    SPEC,
    P,
    alter_slowly,
    expected_marks,
    rows_of,
    score_slowly,
)

BUDGET = 80
GOLDEN = load_golden("hardinfer_base", "hardinfer_topp")
SELECTORS: tuple[Selector, ...] = ("vanilla", "snapkv", "rkv")


def weigh(selector: Selector, attended: Tensor, *, averaged: bool) -> Tensor:
    """Probabilities of the golden's heads; tokens that are not attended still lie in their slots."""
    keys = GOLDEN["K"][0]
    raw = GOLDEN["scores_max_over_group"][0].masked_fill(~GOLDEN["effective_mask"][:, None], -torch.inf)
    stored = torch.ones_like(attended)

    def alter(scores: Tensor) -> Tensor:
        if selector == "vanilla":
            return scores
        if selector == "snapkv":
            return pool_scores(scores, stored, 7)
        return weigh_redundancy(scores, stored, measure_redundancy(keys, stored, 0.5, 1), 0.07)

    return weigh_slots(raw, alter, selector, attended, averaged=averaged)


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("selector", SELECTORS)
def test_sparse_masks_are_the_programs(selector: Selector, call: int) -> None:
    """R-KV's first call gives slots that are not attended a probability too."""
    attended = GOLDEN["effective_mask"]
    if selector == "rkv" and not call:
        attended = torch.ones_like(attended)
    window = 31 if selector == "vanilla" else 32
    probabilities = weigh(selector, attended, averaged=True)[:, 0]
    found = select_sparse(probabilities, P, BUDGET - window - 1, window)
    assert torch.equal(found, GOLDEN[f"sparse.{selector}.call{call}.selected_mask"])


@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("selector", SELECTORS)
def test_rewritten_slots_are_the_programs(selector: Selector, size: int) -> None:
    attended = GOLDEN["effective_mask"]
    first = torch.ones_like(attended) if selector == "rkv" else attended
    marked = mark_top_p(weigh(selector, first, averaged=False), P).any(1)
    written = rank_rewritten(marked, attended, 32).argsort(1)[:, :size]
    assert torch.equal(written.T, GOLDEN[f"rewrite{size}.{selector}.kept_ids"].long())


def expected_sparse(selector: Selector, q: Tensor, k: Tensor, held: list[int], end: int) -> list[int]:
    """What the sparse classes keep of a head, one head, loops; half of 24 tokens are taken whatever their mass."""
    raw, changed = score_slowly(selector, q, k, held, end)
    temperature = 1.0 if selector == "vanilla" else 0.5
    if selector == "rkv":
        changed = alter_slowly("rkv", raw.softmax(1).mean(0).log(), k, held)[None]
    mean = (changed / temperature).softmax(1).mean(0)
    forced = {0, *range(len(held) - LATEST, len(held))}
    marked = mark_top_p(mean, P).nonzero().flatten().tolist()
    wanted = {*marked, *mean.topk(12 - LATEST - 1).indices.tolist()} - forced
    best = sorted(wanted, key=lambda slot: (-float(mean[slot]), -slot))[: 24 - len(forced)]
    return sorted(held[slot] for slot in {*forced, *best})


def expected_rewrite(selector: Selector, q: Tensor, k: Tensor, held: list[int], end: int) -> list[int]:
    """What the rewriting classes keep of a head, at most 24 tokens."""
    temperature = 1.0 if selector == "vanilla" else 0.5
    marked = expected_marks(selector, q, k, held, end, temperature)[0].any(0).tolist()
    first, middle, latest = held[:1], range(1, len(held) - LATEST), held[-LATEST:]
    order = [held[i] for i in middle if marked[i]] + [held[i] for i in middle if not marked[i]]
    return sorted([*first, *latest, *order][:24])


@pytest.mark.parametrize("select", ["official_sparse", "official_rewrite"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_runs_keep_what_loops_keep(selector: Selector, select: Select) -> None:
    settings = {"queries": ASKS, "window": LATEST, "kernel": KERNEL, "mix": MIX}
    method = HardKV(selector=selector, select=select, calibration="official", **settings)  # type: ignore[arg-type]
    inputs = tokens_of(SPEC, 2, groups=2)
    cache, seen, _ = watch(method, SPEC, inputs, 24)
    expected = expected_sparse if select == "official_sparse" else expected_rewrite
    threshold, dropped = (12 if select == "official_sparse" else 24), 0
    for _, q, k, shown, kept in rows_of(seen, inputs):
        drops = len(shown) > threshold
        assert kept == (expected(selector, q, k, shown, len(k)) if drops else shown)
        dropped += len(shown) - len(kept)
    assert dropped > 0
    assert cache.ledger.peak_tokens <= method.budget.capacity
