"""HeatKV's scores of heads: equal to the official accumulator, ranked as it ranks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.methods.heatkv.scores import cas, rank_heads, scas
from tests.support.places import GOLDENS

TOY = np.load(GOLDENS / "heatkv" / "scas_toy.npz")


def toy_mass() -> Tensor:
    """Mass of the synthetic attention: the conditional row, mean over queries (in float32) and prompts."""
    lengths = TOY["t"].tolist()
    starts = np.cumsum([0, *lengths])
    mass = torch.zeros(2, 3, 5, 5, dtype=torch.float64)
    for prompt in range(2):
        for k in range(5):
            for layer in range(2):
                probabilities = torch.from_numpy(TOY[f"probs_p{prompt}_k{k}_l{layer}"][0])
                for i in range(k + 1):
                    paid = probabilities[:, :, starts[i] : starts[i + 1]].sum(-1).mean(-1)
                    mass[layer, :, k, i] += paid.double() / 2
    return mass


@pytest.mark.parametrize("sinks", [1, 2])
def test_scores_and_orders_equal_the_official_accumulator(sinks: int) -> None:
    scores, expected = scas(toy_mass()), torch.from_numpy(TOY[f"scores_s{sinks}"])
    eligible = slice(sinks, 4)
    assert (scores[..., eligible] - expected[..., eligible]).abs().max() < 1e-12
    assert scores[..., 4].isnan().all()
    ranks = rank_heads(scores)
    for source, order in zip(range(sinks, 4), TOY[f"orders_s{sinks}"], strict=True):
        for place, (head, layer) in enumerate(order):
            assert ranks[source, layer, head] == place


def test_cas_is_the_last_scale_past_the_sinks() -> None:
    mass = toy_mass()
    for sinks in range(4):
        expected = mass[:, :, 4, sinks:4].sum(-1) / (5 - sinks)
        torch.testing.assert_close(cas(mass, sinks), expected)


def test_ties_go_by_head_then_layer() -> None:
    ranks = rank_heads(torch.zeros(2, 3, 1, dtype=torch.float64))[0]
    assert ranks.tolist() == [[0, 2, 4], [1, 3, 5]]
