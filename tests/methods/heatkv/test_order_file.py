"""HeatKV's order files: what is written is read, and only files that belong to the model are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.order_file import read_orders, write_orders
from kvbench.methods.heatkv.scores import AttentionByScale, rank_heads, scas
from kvbench.methods.shared.calibration import Artifact

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
        (json.dumps([[[h, j] for h in range(3) for j in range(2)]] * 4), "more than small has sources"),
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
