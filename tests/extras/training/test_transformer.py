"""Transformers in training: attention equals torch's; stages: steps, what has been spent, how tokens weigh."""

import pytest
import torch
from torch.nn import functional as F

from kvbench.core.segments import next_scale
from kvbench.extras.training import transformer
from kvbench.extras.training.transformer import NextScaleRecipe, Stage, token_weights

SEGMENTS = next_scale([(1, 1), (2, 2), (3, 3)])  # 1, 5, 14 tokens up to each
STAGES = (Stage(1, 8, 2), Stage(3, 4, 3))
RECIPE = NextScaleRecipe(stages=STAGES)


def test_every_step_belongs_to_one_stage() -> None:
    found = [RECIPE.find_stage(step) for step in range(RECIPE.steps)]
    assert found == [STAGES[0]] * 2 + [STAGES[1]] * 3
    with pytest.raises(IndexError):
        RECIPE.find_stage(5)


def test_the_rate_follows_the_tokens_that_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 40 steps of warming up these are the first; the rate is not yet the schedule's.
    assert RECIPE.rate_by_cost(SEGMENTS, 1) == pytest.approx(2 / 40)
    monkeypatch.setattr(transformer, "warm_hold_decay", lambda step, progress, hold: progress)
    costs = [8, 8, 56, 56, 56]
    shares = [sum(costs[:step]) / sum(costs) for step in range(6)]
    assert [RECIPE.rate_by_cost(SEGMENTS, step) for step in range(6)] == pytest.approx(shares)


def test_tokens_of_large_scales_weigh_less_and_the_mean_is_one() -> None:
    weights = token_weights(SEGMENTS)
    assert weights.mean().item() == pytest.approx(1)
    assert (weights[0] / weights[-1]).item() == pytest.approx(9**0.25)
    assert torch.equal(weights[1:5], weights[1].expand(4))


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_in_parts_is_causal_attention(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(transformer, "QUERY_BLOCK", 3)
    q, k, v = torch.randn(2, 4 * groups, 10, 8), torch.randn(2, 4, 10, 8), torch.randn(2, 4, 10, 8)
    found = transformer.attend_causally(0, q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    torch.testing.assert_close(found, expected)
