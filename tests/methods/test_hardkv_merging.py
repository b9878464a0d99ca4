"""Hard-KV's merging: what the authors' program makes of keys and values, and what becomes of lse."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.methods.hardkv.merging import MergePlan, merge_exactly, merge_fixed_budget, merge_multi_to_one
from tests.support.goldens import load_golden

TOPK = 120
GOLDEN_HEADS = 2
GOLDEN = load_golden("hardinfer_base", "hardinfer_merge")
"""Two heads of the program's; keys and queries are those of `hardinfer_base`."""


def keys_of_base() -> Tensor:
    return GOLDEN["K"][0, :GOLDEN_HEADS]


def lse_of(keys: Tensor) -> Tensor:
    """Log-sum-exp of the golden's queries, [heads, group, queries]."""
    queries = GOLDEN["Q"][0].view(-1, 2, 8, 16)[:GOLDEN_HEADS]
    return (queries @ keys[:, None].mT / 4).logsumexp(-1)


def golden_plan() -> tuple[MergePlan, Tensor]:
    """The 40 of least score leave, all others may take; and the slots by falling score."""
    score = GOLDEN["score"]
    order = score.argsort(1, descending=True)
    leaves = torch.zeros_like(score, dtype=torch.bool).scatter_(1, order[:, TOPK:], value=True)
    return MergePlan(score, score, leaves, ~leaves), order


@pytest.mark.parametrize(("merge", "taking"), [(merge_fixed_budget, 160 - TOPK), (merge_multi_to_one, 1)])
def test_merging_is_the_programs(merge: Callable[..., tuple[Tensor, Tensor]], taking: int) -> None:
    """One budget's list has what was left untouched by time, then what was merged by mass; the other's is turned."""
    plan, order = golden_plan()
    keys, values = merge(keys_of_base(), GOLDEN["V"], plan)
    lists = [order[:, taking:TOPK].sort(1).values, order[:, :taking]]
    slots = torch.cat(lists if merge is merge_fixed_budget else lists[::-1], 1)[..., None].expand(-1, -1, 16)
    for found, name in ((keys, "K"), (values, "V")):
        expected = GOLDEN[f"{merge.__name__}.{name}"]
        torch.testing.assert_close(found.gather(1, slots), expected, atol=1e-6, rtol=1e-5)
    stays = keys.gather(1, order[:, :TOPK, None].expand(-1, -1, 16))
    torch.testing.assert_close(lse_of(stays), GOLDEN[f"{merge.__name__}.lse_after"])


def test_exact_merging_loses_less_than_eviction() -> None:
    """By the program's figures eviction loses lse and linear merging more; a bias gives some of it back."""
    plan, order = golden_plan()
    keys, _, bias = merge_exactly(keys_of_base(), GOLDEN["V"], torch.zeros(GOLDEN_HEADS, 160), plan)
    stays = order[:, :TOPK]
    queries = GOLDEN["Q"][0].view(-1, 2, 8, 16)[:GOLDEN_HEADS]
    scores = queries @ keys[:, None].mT / 4 + bias[:, None, None]
    after = scores.gather(-1, stays[:, None, None].expand(-1, 2, 8, -1)).logsumexp(-1).mean()
    full, evicted = (GOLDEN[name].mean() for name in ("lse_full", "lse_evict_topk"))
    torch.testing.assert_close(lse_of(keys_of_base()).mean(), full)
    assert GOLDEN["merge_multi_to_one.lse_after"].mean() < GOLDEN["merge_fixed_budget.lse_after"].mean()
    assert GOLDEN["merge_fixed_budget.lse_after"].mean() < evicted < after
    assert after < full


def draw(seed: int, slots: int) -> tuple[Tensor, Tensor, MergePlan]:
    """Keys, values and a plan of two rows in which score and mass disagree and some slots do neither."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, slots, 3, generator=generator)
    score, mass = torch.rand(2, 2, slots, generator=generator)
    kind = torch.randint(0, 4, (2, slots), generator=generator)
    return keys, values, MergePlan(score, mass, kind >= 2, kind == 1)


def test_slots_without_mass_change_nothing() -> None:
    keys, values, plan = draw(0, 6)
    nothing = plan._replace(mass=torch.zeros(2, 6))
    for merge in (merge_fixed_budget, merge_multi_to_one):
        assert all(
            torch.equal(new, old)
            for new, old in zip(merge(keys, values, nothing), (keys, values), strict=True)
        )
    assert torch.equal(merge_exactly(keys, values, torch.zeros(2, 6), nothing)[2], torch.zeros(2, 6))
