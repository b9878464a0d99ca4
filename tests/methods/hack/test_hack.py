"""HACK: its classes of heads by an explicit matrix, the budgets of both, and what each keeps."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.methods.hack.classes import ColumnVariance, HeadPatterns, find_contextual
from kvbench.methods.hack.method import HACK
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.view import View
from tests.support.engine import open_cache, prepared, run, small, tokens_of

SPEC = small(layers=4, sides=(1, 2, 3, 4, 5, 6), scale=0.8)
SINKS = 2


def sigma(seed: int = 0, spec: ModelSpec = SPEC) -> Artifact:
    values = torch.rand(spec.layers, spec.heads, generator=torch.Generator().manual_seed(seed)).double()
    return Artifact(ColumnVariance.kind, {"sigma": values})


@given(st.floats(0, 1), st.floats(0, 1), st.fractions(0, 1).filter(lambda b: b > 0), st.integers(0, SINKS))
@settings(max_examples=200, deadline=None)
def test_rooms_use_the_budget_to_within_a_token(
    alpha: float, contextual: float, share: object, sinks: int
) -> None:
    budget = Budget.parse(str(share), SPEC)
    method = HACK(sinks, alpha, contextual)
    try:
        method.prepare(SPEC, budget, sigma())
    except InfeasibleBudget as error:
        smallest = str(error).split("smallest feasible budget is ")[1].split(",")[0]
        assert Budget.parse(smallest, SPEC).capacity > budget.capacity
        method.check(SPEC, Budget.parse(smallest, SPEC))
        return
    assert budget.capacity - SPEC.all_heads < int(method.capacities.sum()) <= budget.capacity
    assert method.capacities.min() >= 1
    assert method.capacities.max() <= SPEC.cached_length
    structural = method.capacities[~method.is_contextual]
    assert (structural >= (SPEC.ends[sinks - 1] if sinks else 0)).all()
    if len(structural):
        assert structural.max() - structural.min() <= 1
        if structural.max() < SPEC.cached_length:
            assert method.capacities.sum() == budget.tokens
    if budget.fraction == 1:
        assert (method.capacities == SPEC.cached_length).all()


def test_the_default_rooms_are_the_paper_s_shares() -> None:
    method = prepared(HACK(SINKS, 0.5), SPEC, "20", sigma())
    assert method.capacities[method.is_contextual].unique().tolist() == [4]
    assert method.capacities[~method.is_contextual].unique().tolist() == [36]


def slow_choice(
    method: HACK, layer: int, head: int, mass: dict[int, float], newest: range, recent: str
) -> set[int]:
    """Positions that a head keeps, of those in `mass` (what they receive)."""
    room, sinks = int(method.capacities[layer, head]), SPEC.ends[SINKS - 1]
    order = sorted(mass, key=lambda p: (-mass[p], p))
    if method.is_contextual[layer, head]:
        return set(order[:room])
    kept = [p for p in mass if p < sinks]
    current = [p for p in order if p in newest and p >= sinks]
    if recent == "tail":
        current.sort(reverse=True)
    rest = [p for p in order if p not in newest and p >= sinks]
    return set((kept + current + rest)[:room])


@pytest.mark.parametrize("recent", ["scored", "tail"])
@pytest.mark.parametrize("budget", ["0.2", "0.45", "0.8"])
def test_each_class_keeps_its_tokens(budget: str, recent: Literal["scored", "tail"]) -> None:
    method = prepared(HACK(SINKS, observed=5, recent=recent), SPEC, budget, sigma(3))
    compared, inner = [], method.keep

    def keep(view: View) -> torch.Tensor | None:
        kept, at = inner(view), view.segment
        some = [i * at.length // min(5, at.length) for i in range(min(5, at.length))]
        paid = view.scores(torch.tensor(some)).softmax(-1).mean((1, 2))
        for row, slots in enumerate(view.position.tolist()):
            mass = {p: float(paid[row, i]) for i, p in enumerate(slots) if p >= 0}
            own = mass if kept is None else {p for i, p in enumerate(slots) if p >= 0 and kept[row, i]}
            newest = range(at.start, at.end)
            assert set(own) == slow_choice(method, view.layer, row % SPEC.heads, mass, newest, recent)
            compared.append(len(own) < len(mass))
        return kept

    method.keep = keep
    cache = KVCache(SPEC, method, dtype=torch.float32)
    run(cache, tokens_of(SPEC, 2, seed=7))
    assert any(compared)
    assert cache.ledger.peak_tokens <= method.budget.capacity


def test_ties_go_to_the_earlier_layer_and_head() -> None:
    sigma = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert find_contextual(sigma, 0.5).tolist() == [[False, True, True], [False, False, True]]
    assert not find_contextual(sigma, 0).any()
    assert find_contextual(sigma, 1).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_patterns_are_what_an_explicit_matrix_shows(groups: int) -> None:
    spec = small(scale=0.8)
    observer = HeadPatterns()
    inputs = tokens_of(spec, 4, groups=groups)  # prompts 0 and 1, then their unconditional twins
    run(open_cache(observer, spec), inputs)
    mass = torch.zeros(spec.layers, spec.heads, 4, 4, dtype=torch.float64)
    sigma = torch.zeros(spec.layers, spec.heads, dtype=torch.float64)
    for k, layer, head, prompt in (
        (k, i, h, n) for k in range(4) for i in range(2) for h in range(3) for n in range(2)
    ):
        keys = torch.cat([inputs[s][layer][1][prompt, head] for s in range(k + 1)]).double()
        q = inputs[k][layer][0][prompt, head * groups : (head + 1) * groups].double().flatten(0, 1)
        paid = (0.8 * q @ keys.T).softmax(-1)
        for s, at in enumerate(spec.segments[: k + 1]):
            mass[layer, head, k, s] += paid[:, at.start : at.end].sum(1).mean() / 2
        if k == 3:
            sigma[layer, head] += paid.var(0, correction=0).sum() / 2
    found = observer.average()
    torch.testing.assert_close(found["mass"], mass, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["sigma"], sigma, rtol=1e-5, atol=1e-7)
