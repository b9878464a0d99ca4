"""LazyEviction against a port of the authors' program over whole generations, and a slow reference with shared keys."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.lazy_eviction import LazyEviction, measure_importance
from kvbench.methods.shared.view import View
from tests.support.engine import tokens_of, watch
from tests.support.goldens import load_golden

CASES = {"a": (7, 16, 48, 0.02, 0), "b": (10, 20, 50, 0.01, 1)}
"""Tokens of the prompt, window, slots, alpha, segments that stay."""


def inputs_of(case: str) -> tuple[ModelSpec, list[list[tuple[Tensor, ...]]]]:
    """Keys that are unit vectors, so that a query's channels are its logits."""
    prompt, window, *_ = CASES[case]
    logits = load_golden(f"ld_lazyeviction_{case}")["logits"].float().transpose(0, 1)
    heads, steps, tokens = logits.shape
    segments = next_token(prompt, [window] * (steps // window) + [1])
    spec = ModelSpec("golden", 1, heads, tokens + 1, segments, branches=1)
    q = torch.zeros(1, heads, tokens + 1, tokens + 1)
    q[0, :, prompt:-1, :-1] = logits
    k = torch.eye(tokens + 1).expand(1, heads, -1, -1)
    lengths = [segment.length for segment in segments]
    parts = zip(q.split(lengths, 2), k.split(lengths, 2), strict=True)
    return spec, [[(one, other, other)] for one, other in parts]


@pytest.mark.parametrize("case", CASES)
def test_a_generation_is_that_of_the_program(case: str) -> None:
    g, (prompt, window, budget, alpha, sinks) = load_golden(f"ld_lazyeviction_{case}"), CASES[case]
    spec, inputs = inputs_of(case)
    method = LazyEviction(alpha=alpha, sinks=sinks)
    seen, inner = [], method.score

    def score(view: View) -> Tensor:
        seen.append((view.segment.end - prompt, view.position.clone(), view.state.clone()))
        return inner(view)

    method.score = score  # type: ignore[method-assign]
    asked = watch(method, spec, inputs, budget).asked
    kept = {one.scale * window: one.ids() for one in asked if one.scale}
    decisions = sorted(int(name.rpartition(".")[2]) for name in g if name.startswith("kept.ids."))
    assert [step for step, *_ in seen] == decisions
    for step, position, state in seen:
        assert position.tolist() == g[f"before.ids.{step}"].tolist()
        assert state[..., 0].tolist() == g[f"before.last.{step}"].tolist()
        assert state[..., 1].tolist() == g[f"before.mri.{step}"].tolist()
        found = measure_importance(step - state[..., 0], state[..., 1], "program")
        torch.testing.assert_close(found, g[f"importance.{step}"], rtol=0, atol=1e-6)
        assert kept[step] == g[f"kept.ids.{step}"].sort(1).values.tolist()
    assert len(decisions) > 1


def simulate(spec: ModelSpec, inputs: Any, budget: int, alpha: float, group: str) -> list[list[int]]:
    """What each KV head of one sequence holds after the last decision, token by token."""
    start = spec.segments[0].end
    q, k = (torch.cat([s[0][n] for s in inputs], 2)[0].double() for n in (0, 1))
    result = []
    for head in range(spec.heads):
        held = list(range(start))
        last, longest = dict.fromkeys(held, 0), dict.fromkeys(held, 0)
        for segment in spec.segments[1:-1]:
            for token in range(segment.start, segment.end):
                step = token - start + 1
                held.append(token)
                last[token], longest[token] = step - 1, 0
                share = [
                    (k[head, held] @ one[token] * spec.logit_scale).softmax(0)
                    for one in q[head * spec.group : (head + 1) * spec.group]
                ]
                joined = torch.stack(share)
                joined = joined.amax(0) if group == "max" else joined.mean(0)
                for one, received in zip(held, joined.tolist(), strict=True):
                    if received >= alpha:
                        longest[one], last[one] = max(longest[one], step - last[one]), step
            if len(held) > budget:
                worth = {
                    one: measure_importance(
                        torch.tensor(float(step - last[one])), torch.tensor(float(longest[one])), "program"
                    ).item()
                    for one in held
                }
                old = [one for one in held if one < segment.end - 8]
                best = sorted(old, key=lambda one: (-worth[one], one))[: budget - (len(held) - len(old))]
                held = sorted(best) + held[len(old) :]
        result.append(held)
    return result


@given(st.integers(0, 10**6), st.sampled_from([0.03, 0.08, 0.2]), st.sampled_from(["max", "mean"]))
@settings(max_examples=12, deadline=None)
def test_query_heads_share_slots(seed: int, alpha: float, group: Any) -> None:
    spec = ModelSpec("shared", 1, 2, 8, next_token(5, [8, 8, 8, 3]), 1, 1.0, group=2)
    inputs = tokens_of(spec, 1, seed, groups=2)
    asked = watch(LazyEviction(alpha=alpha, group=group), spec, inputs, 14).asked
    assert asked[-1].ids() == simulate(spec, inputs, 14, alpha, group)


def test_importance_falls_with_quiet_spells_and_in_the_program_with_intervals() -> None:
    interval = torch.arange(1.0, 10)
    for formula in ("program", "paper"):
        by_quiet = measure_importance(torch.arange(40.0), torch.full((40,), 5.0), formula)
        assert (by_quiet.diff() < 0).all()
        never = measure_importance(torch.tensor([0.0, 3.0]), torch.zeros(2), formula)
        assert never[1] == 0
        assert never[0] == (1 if formula == "paper" else pytest.approx(2 * 0.26894143))
    just_hit = [measure_importance(torch.zeros(9), interval, f) for f in ("program", "paper")]
    assert (just_hit[0].diff() < 0).all()
    assert (just_hit[1].diff() > 0).all()
