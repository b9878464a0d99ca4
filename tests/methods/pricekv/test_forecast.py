"""PriceKV by forecast: the calibration against masked attention, and what heads hold in a cache."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.pricekv.errors import Importance
from kvbench.methods.pricekv.forecast import EPSILON, Forecast
from kvbench.methods.pricekv.method import PriceKV, ScoreErrors
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.full_scores import list_capacities
from tests.support.engine import tokens_of, watch
from tests.support.layer_outputs import FOLD, SCALES, Inputs, attention, observe, project

ROWS = replace(SCALES, name="rows", segments=next_token(3, [4, 4, 4, 4, 3]), line=4)
DECAY = 0.6


STILL: dict[str, Any] = {"surprise": 0.0, "contrast": 0.0}
"""Settings under which the forecast reads no data."""


def stand_in(method: PriceKV, spec: ModelSpec) -> Artifact:
    return method.needs().make_random_artifact(spec)


def priced(floor: int | None = None, **chosen: Any) -> PriceKV:
    return PriceKV(base=Forecast(**(STILL | chosen)), floor=floor)


# The calibration


def slow_means(
    spec: ModelSpec, inputs: Inputs, importance: Importance, power: float
) -> tuple[dict[tuple[int, ...], Tensor], dict[tuple[int, ...], Tensor]]:
    """What positions are worth to segment k and receive from it, by (branch, layer, head, k): means over prompts."""
    prompts = len(inputs[0][0][0]) // spec.branches
    worth: dict[tuple[int, ...], Tensor] = {}
    received: dict[tuple[int, ...], Tensor] = {}
    for layer, k in np.ndindex(spec.layers, len(spec.segments)):
        for sequence, head, p, v in attention(spec, inputs, layer, k):
            key = (sequence // prompts, layer, head, k)
            paid = p.mean((0, 1))
            received[key] = received.get(key, 0) + paid / prompts
            if importance == "output":
                outputs = p @ v
                apart = project((v - outputs[:, :, None]), spec, layer, head)
                paid = (p.square() * apart.square().sum(-1)).mean(1).sum(0)
            worth[key] = worth.get(key, 0) + paid**power / prompts
    return {key: mean ** (1 / power) for key, mean in worth.items()}, received


@pytest.mark.parametrize(
    ("spec", "error_power", "base"),
    [
        (SCALES, 0.5, Forecast("mass", DECAY, surprise=0.0, memory=1.0, contrast=2.0, power=8.0)),
        (SCALES, 2.0, Forecast("output", DECAY, surprise=0.3, memory=1.0, contrast=0.5, power=3.0)),
        (ROWS, 1.0, Forecast("mass", DECAY, surprise=0.0, memory=1.0, contrast=0.0, power=1.0)),
        (ROWS, 1.0, Forecast("output", DECAY, surprise=0.5, memory=0.6, contrast=0.0, power=1.0)),
    ],
)
def test_the_calibration_is_that_of_masked_attention(
    spec: ModelSpec, error_power: float, base: Forecast
) -> None:
    inputs = tokens_of(spec, 2 * spec.branches, groups=FOLD)
    found = observe(ScoreErrors(base, error_power=error_power), spec, [inputs], passes=2)
    worth, received = slow_means(spec, inputs, base.importance, base.power)
    prompts, last = 2, len(spec.segments) - 1
    forecast: dict[tuple[int, ...], Tensor] = {}
    for branch, layer, head in np.ndindex(spec.branches, spec.layers, spec.heads):
        key, start = (branch, layer, head), 0
        for k in range(last):
            end = spec.ends[k]
            torch.testing.assert_close(
                found["importance"][(*key, slice(start, start + end))],
                worth[*key, k + 1][:end],
                rtol=1e-4,
                atol=1e-6,
            )
            later = (DECAY ** (m - k - 1) * worth[*key, m][:end] for m in range(k + 1, last + 1))
            forecast[*key, k] = torch.stack(list(later)).sum(0)
            start += end
    expected = torch.zeros_like(found["error"])
    for number, capacity in enumerate(list_capacities(spec)):
        held: dict[tuple[int, ...], list[int]] = {}
        more: dict[tuple[int, ...], Tensor] = {}
        for k, layer in np.ndindex(last + 1, spec.layers):
            at = spec.segments[k]
            for sequence, head, p, v in attention(spec, inputs, layer, k):
                row, branch = (sequence, layer, head), sequence // prompts
                seen = torch.zeros(at.end, dtype=torch.bool)
                seen[[*held.get(row, []), *range(at.start, at.end)]] = True
                if k:
                    left = p * seen
                    apart = project(left @ v / left.sum(-1, keepdim=True) - p @ v, spec, layer, head)
                    error = (apart.square().sum((0, -1)) ** error_power).mean()
                    expected[layer, head, k - 1, number] += error / prompts / spec.branches
                if k < last:
                    key = (branch, layer, head, k)
                    taken = forecast[key].sqrt() if base.importance == "output" else forecast[key]
                    score = (taken + EPSILON).log()
                    own = (p.mean((0, 1)) + EPSILON).log() - (received[key][: at.end] + EPSILON).log()
                    own += (received[key][: at.end] + EPSILON).sum().log()
                    own[: at.start] += base.memory * more.get(row, torch.zeros(0))
                    more[row] = own
                    score += base.surprise * own
                    if base.contrast:
                        far = (v - v.mean(0)).expand(FOLD, -1, -1)
                        apart = project(far, spec, layer, head).square().sum(-1).mean(0)
                        score += base.contrast * (apart / apart.mean() + EPSILON).sqrt().log()
                    order = score.masked_fill(~seen, -torch.inf).argsort(descending=True, stable=True)
                    held[row] = [j for j in order[:capacity].tolist() if seen[j]]
    expected = expected ** (1 / error_power)
    torch.testing.assert_close(found["error"], expected, rtol=1e-3, atol=1e-6)
    assert (found["error"][..., -1] < 1e-9).all()
    assert (found["error"][..., 0] > 0).all()


# The method


def test_the_condition_stays_whole_where_it_is_a_block() -> None:
    """Its best position is worth more than any other position, and its others less than all: the floor holds it."""
    tokens, block = priced(3), priced(3, condition="block")
    artifact, start = stand_in(block, ROWS), 0
    for end in ROWS.ends[:-1]:
        artifact.tensors["importance"][..., start : start + 3] = torch.tensor([0.0, 3.0, 1e-3])
        start += end
    inputs = tokens_of(ROWS, 2 * ROWS.branches)
    held = [watch(method, ROWS, inputs, 5, artifact).asked[-1].ids() for method in (tokens, block)]
    assert all(1 in row and 0 not in row and len(row) > 2 for row in held[0])
    assert all(row[:3] == [0, 1, 2] for row in held[1])


@pytest.mark.parametrize(
    ("floor", "tokens", "held"), [(None, 9, 3 + 4), (None, 15, 9), (2, 9, 2), (99, 9, 9)]
)
def test_a_head_that_buys_nothing_holds_the_floor(floor: int | None, tokens: int, held: int) -> None:
    """Three heads of four lose by every token that they lack, and together can hold nearly all of B."""
    method, budget = priced(floor), Budget.parse(tokens, ROWS)
    artifact = stand_in(method, ROWS)
    error = artifact.tensors["error"]
    error.copy_(-torch.tensor(list_capacities(ROWS)).expand(error.shape))
    error[0, 0] = 0
    method.prepare(ROWS, budget, artifact)
    assert method.capacities[-1, 0, 0] == held
    assert method.capacities[-1].sum() == 4 * tokens
