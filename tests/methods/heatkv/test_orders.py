"""HeatKV's scores and orders are the official accumulator's, and only order files of the model are read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.order_file import read_orders, write_orders
from kvbench.methods.heatkv.scores import AttentionByScale, cas, rank_heads, scas
from kvbench.methods.shared.calibration import Artifact
from tests.support.places import GOLDENS

KIND = AttentionByScale.kind
SPEC = ModelSpec("small", 2, 3, 8, next_scale([(1, 1), (2, 2), (3, 3), (4, 4)]))
METADATA = {"model": "small", "seed": 3}


def some_ranks() -> np.ndarray:
    return rank_heads(torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("sinks", [0, 1, 2])
def test_orders_come_back(sinks: int, tmp_path: Path) -> None:
    path, ranks = tmp_path / "orders.json", some_ranks()
    write_orders(path, ranks, sinks, METADATA)
    found = read_orders(path, SPEC, sinks)
    assert np.array_equal(found[sinks:3], ranks[sinks:3])
    stored = json.loads(path.read_text())
    assert stored["metadata"] == METADATA
    path.write_text(json.dumps(stored["orders"]))
    assert np.array_equal(read_orders(path, SPEC, sinks)[sinks:3], ranks[sinks:3])
    if sinks < 2:
        assert np.array_equal(read_orders(path, SPEC, sinks + 1)[sinks + 1 : 3], ranks[sinks + 1 : 3])
    if sinks:
        with pytest.raises(ValueError, match=f"{3 - sinks} orders, small with sinks={sinks - 1} needs"):
            read_orders(path, SPEC, sinks - 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ('{"metadata": {}}', "no orders"),
        ("[]", "0 orders"),
        (json.dumps([[[h, j] for h in range(3) for j in range(2)]] * 4), "but small has fewer sources"),
        (json.dumps([[[0, 0]] * 6] * 3), "not a permutation of the 6"),
        (json.dumps([[[h, j] for h in range(2) for j in range(3)]] * 3), "not a permutation of the 6"),
        (json.dumps([[[0, 0], [1]]] * 3), "source scale 0 is not a permutation"),
        (json.dumps([["x"]] * 3), "not a permutation"),
        (
            json.dumps([[[-1, 0], *([h, j] for h in range(3) for j in range(2) if h + j)]] * 3),
            "not a permutation",
        ),
    ],
)
def test_wrong_order_files_are_refused(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"method.orders=.*{why}"):
        read_orders(path, SPEC, 0)
    with pytest.raises(ValueError, match=r"method\.orders="):
        HeatKV(0, str(path)).check(SPEC, Budget.parse("0.5", SPEC))


def test_a_missing_order_file_and_one_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_orders(tmp_path / "gone.json", SPEC, 0)
    path = tmp_path / "orders.json"
    write_orders(path, some_ranks(), 0, {})
    with pytest.raises(ValueError, match=r"not a permutation of the 8 \[head, layer\] pairs of other"):
        read_orders(path, replace(SPEC, name="other", heads=4), 0)


def test_a_written_order_makes_the_schedule_of_its_calibration(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    mass = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    write_orders(path, rank_heads(scas(mass)), 1, {})
    budget = Budget.parse("0.4", SPEC)
    read, made = HeatKV(1, str(path)), HeatKV(1)
    read.prepare(SPEC, budget)
    made.prepare(SPEC, budget, Artifact(KIND, {"mass": mass}))
    assert np.array_equal(read.schedule.absent, made.schedule.absent)
    assert read.schedule.absent.any()


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
