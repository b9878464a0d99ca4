"""HACK++: budgets and scores against slow ones, whole generations against a plain loop, and what is refused."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.schedule import sum_tokens
from kvbench.methods.hack.budgets import group_heads, share_budget, weigh_groups
from kvbench.methods.hack.classes import HeadPatterns
from kvbench.methods.hack.plus_plus import HACKPlusPlus, count_read
from kvbench.methods.shared.calibration import Artifact
from tests.support.engine import close, prepared, small, tokens_of, watch
from tests.support.published import INFINITY

SPEC = small(layers=3, sides=(1, 2, 3, 4, 5, 6), scale=0.8)
VAR = ModelSpec("var", 30, 30, 64, next_scale([(n, n) for n in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)]))


def patterns(spec: ModelSpec = SPEC, seed: int = 0, sharp: float = 3) -> Artifact:
    """Masses as a softmax has them, whose rows sum to 1, unlike from head to head."""
    generator = torch.Generator().manual_seed(seed)
    scales = len(spec.segments)
    shape = (spec.layers, spec.heads, scales, scales)
    logits = sharp * torch.randn(shape, generator=generator, dtype=torch.float64)
    future = torch.ones(scales, scales, dtype=torch.bool).triu(1)
    mass = logits.masked_fill(future, -torch.inf).softmax(-1)
    sigma = torch.rand(shape[:2], generator=generator, dtype=torch.float64)
    return Artifact(HeadPatterns.kind, {"mass": mass, "sigma": sigma})


def ready(budget: str, artifact: Artifact, spec: ModelSpec = SPEC, **options: Any) -> HACKPlusPlus:
    method = prepared(HACKPlusPlus(**options), spec, budget, artifact)
    assert isinstance(method, HACKPlusPlus)
    return method


def slow_fill(tokens: int, weights: Sequence[float], sizes: Sequence[int], reach: Sequence[int]) -> list[int]:
    """Water-filling by bisection of the level."""
    low, high = 0.0, 1e12

    def shares(level: float) -> list[float]:
        return [min(max(1.0, level * w), r) for w, r in zip(weights, reach, strict=True)]

    for _ in range(200):
        middle = (low + high) / 2
        held = sum(n * x for n, x in zip(sizes, shares(middle), strict=True))
        low, high = (middle, high) if held <= tokens else (low, middle)
    exact = shares(low)
    whole = [int(x + 1e-6) for x in exact]
    left = tokens - sum(n * x for n, x in zip(sizes, whole, strict=True))
    for group in sorted(range(len(sizes)), key=lambda g: (-round(exact[g] - whole[g], 6), g)):
        if whole[group] < reach[group] and sizes[group] <= left:
            whole[group] += 1
            left -= sizes[group]
    return whole


@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_published_shares_follow_reliance(tau: float, alpha: float) -> None:
    artifact = patterns(seed=1)
    method = ready("0.3", artifact, alpha=alpha, tau=tau, strict=False)
    mass, tokens = artifact.tensors["mass"], method.budget.tokens
    groups = [
        (layer, kind, [h for h in range(SPEC.heads) if bool(method.is_contextual[layer, h]) == kind])
        for layer, kind in product(range(SPEC.layers), (False, True))
    ]
    groups = [group for group in groups if group[2]]
    held = [0] * len(groups)
    for k, length in enumerate(SPEC.lengths[:-1]):
        paid = [mass[:, :, later, :later].sum(-1) / SPEC.ends[later - 1] for later in range(k + 1, 6)]
        reliance = torch.stack(paid).sum(0)
        means = [float(reliance[layer, heads].mean()) for layer, _, heads in groups]
        weights, sizes = [mean**tau for mean in means], [len(heads) for *_, heads in groups]
        held = slow_fill(tokens, weights, sizes, [before + length for before in held])
        for (layer, _, heads), wanted in zip(groups, held, strict=True):
            assert method.capacities[k, layer, heads].tolist() == [wanted] * len(heads)
        if SPEC.ends[k] * SPEC.all_heads > tokens:
            assert tokens - max(sizes) < method.capacities[k].sum() <= tokens
        else:
            assert (method.capacities[k] == SPEC.ends[k]).all()


@given(
    st.integers(0, 10**6),
    st.sampled_from((0.0, 0.2, 0.5, 1.0)),
    st.sampled_from((0.5, 1.0, 2.0)),
    st.integers(1, 55),
    st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_strict_budgets_hold_after_every_layer(
    seed: int, alpha: float, tau: float, tokens: int, sinks: int
) -> None:
    artifact, least = patterns(seed=seed, sharp=6), max(1, SPEC.leading_tokens(sinks))
    strict, published = (
        ready(f"{max(tokens, least)}/55", artifact, alpha=alpha, tau=tau, strict=strict, sinks=sinks)
        for strict in (True, False)
    )
    assert sum_tokens(strict.capacities).max() <= strict.budget.tokens
    for k, end in enumerate(SPEC.ends[:-1]):
        assert min(strict.capacities[k].min(), published.capacities[k].min()) >= min(least, end)
    assert published.capacities.sum((1, 2)).max() <= published.budget.tokens
    if sum_tokens(published.capacities).max() <= published.budget.tokens:
        # Nothing has to leave early; gaps that rounding left may be filled.
        assert (strict.capacities.sum((1, 2)) >= published.capacities.sum((1, 2)) - SPEC.all_heads).all()


def slow_scores(
    method: HACKPlusPlus, mass: Tensor, k: int, layer: int, head: int, q: Tensor, keys: Tensor, values: Tensor,
    held: list[int],
) -> list[float]:  # fmt: skip
    """What positions held are worth to q [query heads, tokens, D], with keys and values [positions, D]."""
    if method.is_contextual[layer, head] or method.structural == "attention":
        length = q.shape[1]
        some = [i * length // min(method.observed, length) for i in range(min(method.observed, length))]
        paid = (0.8 * q[:, some].flatten(0, 1) @ keys[held].T).softmax(-1).mean(0).tolist()
        half = method.pool // 2
        return [max(paid[max(0, i - half) : i + half + 1]) for i in range(len(paid))]
    found = []
    for position in held:
        source = next(at.index for at in SPEC.segments if at.start <= position < at.end)
        prior = float(mass[layer, head, k, source]) / SPEC.lengths[source]
        norm = float(values[position].square().sum().sqrt())
        found.append(
            (1 if method.structural == "value" else prior) * (1 if method.structural == "prior" else norm)
        )
    return found


def slow_generation(
    method: HACKPlusPlus, mass: Tensor, inputs: Sequence[Sequence[tuple[Tensor, ...]]]
) -> tuple[list[Tensor], list[list[list[int]]]]:
    """Outputs of every layer, and what every row holds after it, with sets of positions and full matrices alone."""
    sequences, fold = inputs[0][0][1].shape[0], inputs[0][0][0].shape[1] // SPEC.heads
    read = count_read(method.attention_budget, SPEC) or SPEC.ends[-1]
    places = product(range(SPEC.layers), range(sequences), range(SPEC.heads))
    held: dict[tuple[int, int, int], list[int]] = {place: [] for place in places}
    outs, kept = [], []
    for at, layer in product(SPEC.segments, range(SPEC.layers)):
        q, k, v = (
            torch.cat([inputs[i][layer][n] for i in range(at.index + 1)], 2).double() for n in range(3)
        )
        q, out, rows = q[:, :, at.start :], torch.zeros_like(inputs[at.index][layer][0]), []
        for sequence, head in product(range(sequences), range(SPEC.heads)):
            tokens = [*held[layer, sequence, head], *range(at.start, at.end)]
            asked = q[sequence, head * fold : (head + 1) * fold]
            worth = slow_scores(
                method, mass, at.index, layer, head, asked, k[sequence, head], v[sequence, head], tokens
            )
            sinks = SPEC.leading_tokens(method.sinks)
            worth = [torch.inf if p < sinks else w for p, w in zip(tokens, worth, strict=True)]
            best = [tokens[i] for i in sorted(range(len(tokens)), key=lambda i: (-worth[i], i))]
            seen = sorted(best[:read])
            attended = (0.8 * asked @ k[sequence, head, seen].T).softmax(-1) @ v[sequence, head, seen]
            out[sequence, head * fold : (head + 1) * fold] = attended.float()
            if not at.last:
                tokens = sorted(best[: int(method.capacities[at.index, layer, head])])
                held[layer, sequence, head] = tokens
                rows.append(tokens)
        outs.append(out)
        kept += [rows] if rows else []
    return outs, kept


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 1),
        ({"alpha": 1.0, "pool": 1}, 1),
        ({"alpha": 0.5, "observed": 5, "pool": 3}, 2),
        ({"alpha": 0.5, "attention_budget": 0.2}, 1),
        ({"alpha": 0.5, "attention_budget": 3, "strict": False}, 2),
        ({"alpha": 0.5, "attention_budget": 1, "tau": 0.0}, 1),
        ({"alpha": 0.5, "sinks": 2, "attention_budget": 0.2}, 1),
        ({"structural": "prior"}, 1),
        ({"structural": "value"}, 1),
        ({"structural": "attention"}, 1),
    ],
)
def test_a_generation_is_that_of_a_plain_loop(options: dict[str, object], groups: int) -> None:
    artifact, inputs = patterns(seed=4), tokens_of(SPEC, 2, seed=6, groups=groups)
    method = HACKPlusPlus(**options)
    _, seen, found = watch(method, SPEC, inputs, "0.25", artifact)
    expected, kept = slow_generation(method, artifact.tensors["mass"], inputs)
    assert [asked.ids() for asked in seen] == kept
    close(found, expected)


def test_budgets_are_converted_as_the_paper_counts_them() -> None:
    shares = (0.5, 0.3, 0.2, 0.1, 0.01)
    assert [count_read(share, INFINITY["2b"]) for share in shares] == [5260, 3156, 2104, 1052, 105]
    assert [count_read(share, VAR) for share in shares] == [340, 204, 136, 68, 6]
    assert (count_read(1, VAR), count_read("1.0", VAR), count_read(2, VAR), count_read(None, VAR)) == (
        680, 680, 2, None,
    )  # fmt: skip


def test_a_class_that_a_layer_lacks_has_no_group() -> None:
    contextual = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    groups = group_heads(contextual)
    assert groups.sizes.tolist() == [2, 1, 3, 3]
    assert groups.of_head.tolist() == [[1, 0, 0], [2, 2, 2], [3, 3, 3]]
    assert groups.starts == (0, 2, 3, 4)
    nothing = weigh_groups(np.zeros((5, 3, 3)), groups, 1.0)  # of a calibration that saw nothing
    assert (nothing == 1).all()
    assert (share_budget(nothing, groups, 45, SPEC, strict=True)[-1] == 5).all()
