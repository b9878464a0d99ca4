"""Contract of every method, plugins' included: on the shapes of small models and on the models that ship.

Each class is tested with its own name's settings; further settings of a class have two tests. Names are known at
collection; objects are made by the tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.storage import CHANNEL
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.engine.schedule import predict_row_lengths, sum_tokens
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.models.noise import PromptNoise
from kvbench.prompts.base import Prompt
from kvbench.runs.calibrate import calibrate
from tests.support.conformance import (
    FAMILIES,
    SPECS,
    TINY,
    artifact_for,
    fits,
    home,
    method_of,
    model,
    ready,
    smallest,
    spec_of,
)
from tests.support.engine import Asked, D, listening, open_cache, prepared, run, shown_to, tokens_of
from tests.support.marks import slow_but_every
from tests.support.methods import GUESTS, class_of, list_representatives, list_variants, settings_of
from tests.support.places import ROOT

METHODS = list_representatives()
BUDGETS = ("0.05", "0.3", "0.9")
Tokens = Sequence[Sequence[tuple[Tensor, ...]]]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def of_sequences(inputs: Tokens, chosen: list[int]) -> Tokens:
    return [[tuple(x[chosen] for x in qkv) for qkv in layers] for layers in inputs]


def kept_by(seen: list[Asked], sequence: int, heads: int) -> list[list[list[int]]]:
    rows = slice(sequence * heads, (sequence + 1) * heads)
    return [asked.ids(rows) for asked in seen]


VARIANTS = [  # a menu of precisions needs a budget in bytes: tests/methods/pricekv
    (name, home(name)) for name in list_variants() if not settings_of(name).get("menu")
]
EVERY = [(name, spec) for name in METHODS for spec in SPECS]


def mark_large(cases: list[tuple[str, ...]]) -> list[ParameterSet]:
    """Cases whose shapes are those of a model that ships are slow, and so are budgets but the smallest."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if case[1] in TINY or case[-1] in BUDGETS[1:] else [])
        for case in cases
    ]


FITTING = [case for case in EVERY if fits(*case)]
each = pytest.mark.parametrize(("name", "spec"), mark_large(FITTING))


@pytest.mark.parametrize(("name", "spec"), [case for case in EVERY if not fits(*case)])
def test_a_model_of_another_family_is_refused(name: str, spec: str) -> None:
    shapes, method = spec_of(spec), method_of(name, spec)
    told = f"method: {type(method).__name__} is for .* and {shapes.name} is a {shapes.family} model; take"
    with pytest.raises(ValueError, match=told):
        method.check(shapes, Budget.parse("0.5", shapes))
    with pytest.raises(ValueError, match=told):
        prepared(method, shapes, "0.5", artifact_for(method, shapes))


@lru_cache
def run_full(spec: str) -> list[Tensor]:
    """Outputs of a generation that keeps everything."""
    return run(open_cache(Full(), spec_of(spec)), tokens_of(spec_of(spec), 2))


@each
def test_the_whole_budget_is_equal_to_full(name: str, spec: str) -> None:
    cache, shapes = ready(name, spec, 1), spec_of(spec)
    inputs = tokens_of(shapes, 2)
    found = run(cache, inputs)
    if not cache.method.strict and cache.ledger.peak_tokens < shapes.full_tokens:
        return  # it has no budget: what it leaves out, it always leaves out
    expected = run_full(spec)
    assert cache.ledger.peak_tokens == shapes.full_tokens
    if cache.method.static:
        assert equal(found, expected)
    for one, other in zip(found, expected, strict=True):  # rows lie otherwise in memory if sequences differ
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "spec"), [(name, home(name)) for name in METHODS])
def test_four_bits_hold_what_more_bits_hold(name: str, spec: str) -> None:
    """Every method decides, stores and attends with codes; one that looks at positions alone keeps the same."""
    method, shapes = method_of(name, spec), spec_of(spec)
    if method.uses.replaces or method.uses.precisions:
        return  # refused, or stored as it says itself
    inputs, budget = tokens_of(shapes, 2, seed=2), 1 if isinstance(method, Full) else "0.3"
    wide, narrow = (ready(name, spec, budget, packing=packing) for packing in (None, Packing(4, CHANNEL)))
    expected, found = run(wide, inputs), run(narrow, inputs)
    assert all(torch.isfinite(one).all() for one in found)
    if narrow.method.static:
        assert narrow.ledger.held == wide.ledger.held
    if narrow.method.strict:
        assert narrow.ledger.peak_tokens <= narrow.method.budget.capacity
    assert narrow.ledger.sequence_bytes < wide.ledger.sequence_bytes * 0.6
    for one, other in zip(found[: shapes.layers], expected, strict=False):  # nothing was stored yet
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "spec", "budget"),
    mark_large([(*case, b) for case in FITTING for b in BUDGETS if b == BUDGETS[0] or case[1] not in TINY]),
)
def test_the_budget_and_the_predicted_lengths_hold_after_every_layer(
    name: str, spec: str, budget: str
) -> None:
    cache, shapes = ready(name, spec, 1 if name == "full" else budget), spec_of(spec)
    predicted = predict_row_lengths(shapes, cache.method)
    seen = listening(cache.method)
    run(cache, tokens_of(shapes, 4, seed=2, groups=2))
    check_budget(cache, 4)
    if predicted is None:
        return  # the data decides, which is allowed: see below for the methods that ship
    assert cache.ledger.tokens_after == sum_tokens(predicted).tolist()
    for asked in seen:
        held = asked.kept.sum(1).view(-1, shapes.heads).tolist()
        assert all(row == predicted[asked.scale, asked.layer].tolist() for row in held)


@pytest.mark.parametrize(("name", "spec"), VARIANTS)
def test_the_budget_of_a_variant_holds(name: str, spec: str) -> None:
    cache = ready(name, spec, "0.3")
    run(cache, tokens_of(spec_of(spec), 2, seed=1, groups=2))
    check_budget(cache, 2)


def check_budget(cache: KVCache, sequences: int) -> None:
    """A strict method exceeds its budget after no layer, and makes use of it."""
    if isinstance(cache.method, Full) or not cache.method.strict:
        return
    capacity = cache.method.budget.capacity
    assert all(tokens <= capacity for row in cache.ledger.tokens_after for tokens in row)
    assert cache.ledger.peak_bytes <= float(capacity) * 2 * D * 4 * sequences
    if cache.method.static:  # every sequence is alike, so the tokens counted are the bytes held
        assert cache.ledger.peak_bytes == cache.ledger.peak_tokens * 2 * D * 4 * sequences
    assert cache.ledger.peak_tokens > 0.4 * capacity  # and it is made use of


def test_data_decides_the_lengths_of_few_methods() -> None:
    shipped = sorted({path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} - {*GUESTS})
    unknown = [
        name
        for name in shipped
        if predict_row_lengths(spec_of(home(name)), ready(name, home(name), 1).method) is None
    ]
    assert unknown == ["adakv", "ams_kv", "critical_adakv", "expected_attention", "hard_kv", "headkv"]


def test_a_calibration_keeps_everything_and_says_so() -> None:
    observers = {
        (home(name), repr(o)): o
        for name in (*METHODS, *list_variants())
        if isinstance(o := method_of(name, home(name)).needs(), Observer)
    }
    for (spec, _), observer in observers.items():
        shapes = spec_of(spec)
        foreseen = predict_row_lengths(shapes, shown_to(observer, shapes))
        full = predict_row_lengths(shapes, prepared(Full(), shapes))
        assert foreseen is not None
        assert full is not None
        assert (foreseen == full).all()
        assert sum_tokens(full).max() == shapes.full_tokens


COMPRESSING = [name for name in METHODS if class_of(name) is not Full]
STRICT = [name for name in COMPRESSING if settings_of(name).get("strict", class_of(name).strict)]
STRICT_CASES = [(name, spec) for name, spec in EVERY if name in STRICT and fits(name, spec)]


@pytest.mark.slow
@given(
    st.sampled_from([case for case in STRICT_CASES if case[1] in ("small", "tokens")]),
    st.fractions(Fraction(1, 50), 1, max_denominator=500),
    st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_any_budget_holds(case: tuple[str, str], share: Fraction, seed: int) -> None:
    cache = ready(*case, str(share), seed)
    run(cache, tokens_of(cache.spec, 2, seed))
    assert cache.ledger.peak_tokens <= cache.method.budget.capacity


def budget_of(name: str) -> float | str:
    return "0.3" if class_of(name) is not Full else 1


@pytest.mark.parametrize(
    ("name", "spec"),
    slow_but_every(3, [*(case for case in FITTING if case[1] not in TINY), *VARIANTS]),
)
def test_prompts_of_a_batch_and_generations_do_not_see_each_other(name: str, spec: str) -> None:
    shapes = spec_of(spec)
    inputs, others = (
        tokens_of(shapes, 4),
        tokens_of(shapes, 4, seed=3),
    )  # prompts 0, 1, then their unconditional twins
    own, foreign = [0, 2], [1, 3]
    mixed = [
        [tuple(a.index_copy(0, torch.tensor(foreign), b[foreign]) for a, b in zip(*qkv, strict=True))
         for qkv in zip(*layers, strict=True)]
        for layers in zip(inputs, others, strict=True)
    ]  # fmt: skip
    results, caches = {}, {}
    for key, given_tokens in {
        "both": inputs, "other": mixed, "first": of_sequences(inputs, own), "second": of_sequences(inputs, foreign)
    }.items():  # fmt: skip
        caches[key] = cache = ready(name, spec, budget_of(name))
        cache.prompts = {"first": [0], "second": [1]}.get(key)
        seen = listening(cache.method)
        results[key] = run(cache, given_tokens), list(seen), cache.method.static
    for key, sequences in (("other", own), ("first", own), ("second", foreign)):
        (out, seen, static), (both, all_seen, _) = results[key], results["both"]
        rows = [0, 1] if key != "other" else own
        for one, other in zip(out, both, strict=True):
            torch.testing.assert_close(one[rows], other[sequences], atol=1e-6, rtol=1e-5)
        for row, sequence in zip(rows, sequences, strict=True):
            index = (0, 0) if static else (row, sequence)
            assert kept_by(seen, index[0], shapes.heads) == kept_by(all_seen, index[1], shapes.heads)
    used = caches["other"]  # another and larger batch leaves nothing behind
    used.prompts = [0]
    assert equal(run(used, of_sequences(inputs, own)), results["first"][0])


@pytest.mark.parametrize(("name", "spec"), mark_large(STRICT_CASES))
def test_a_budget_too_small_is_refused_before_any_work(name: str, spec: str) -> None:
    shapes = spec_of(spec)
    little = Budget.parse(str(Fraction(1, 2 * shapes.cached_length)), shapes)
    with pytest.raises(InfeasibleBudget, match="the smallest feasible budget is ") as refused:
        method_of(name, spec).check(shapes, little)
    with pytest.raises(InfeasibleBudget, match="the smallest feasible budget is "):
        method_of(name, spec).prepare(shapes, little)  # before it asks for a calibration
    minimum = Budget.parse(smallest(refused.value), shapes)
    method_of(name, spec).check(shapes, minimum)
    assert minimum.per_head < 0.25 * shapes.cached_length


def test_a_method_without_keep_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        Method().keep(None)


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, prompts, and what its calibrations found."""

    model: Any
    prompts: list[str]
    found: dict[str, Artifact]


@lru_cache
def loaded(name: str) -> Loaded:
    """A model that ships, and every calibration with one prompt; of a next-token image, the upper half."""
    one = model(name)
    if name == "llamagen_tiny":
        one = replace(one, transformer=replace(one.transformer, grid=(8, 16)))
    one.load("cpu")
    prompts = ["3", "7"] if name == "var_tiny" else ["a red circle", "two blue rings"]
    needs = [method_of(method, name).needs() for method in METHODS if fits(method, name)]
    observers = {repr(observer): observer for observer in needs if isinstance(observer, Observer)}
    found = calibrate(one, [Prompt(0, prompts[0])], list(observers.values()), 1, "cpu", lambda _: None)
    kinds = [observer.kind for observer in observers.values()]
    artifacts = [Artifact(kind, tensors) for kind, tensors in zip(kinds, found, strict=True)]
    return Loaded(one, prompts, dict(zip(observers, artifacts, strict=True)))


QUICKLY_DRAWN = ("var_tiny", "0.1")
UNIFORM = {("meda", "llamagen_tiny"), ("heatkv", "llamagen_tiny")}
"""Layers whose share is so small that an image may come out in one grey."""
DRAWN = [("infinity_tiny", "0.1"), ("var_tiny", "0.1"), ("llamagen_tiny", "0.2")]


@pytest.mark.parametrize(
    ("name", "spec", "budget"),
    [
        pytest.param(name, *one, marks=[] if one == QUICKLY_DRAWN else [pytest.mark.slow])
        for place, name in enumerate(METHODS)
        for one in DRAWN
        if fits(name, one[0]) and (one != QUICKLY_DRAWN or place % 4 == 0)
    ],
)
def test_the_models_draw_images(name: str, spec: str, budget: str) -> None:
    there = loaded(spec)
    method, shapes = method_of(name, spec), there.model.spec
    budget = budget if name in COMPRESSING else "1"
    try:
        method.check(shapes, Budget.parse(budget, shapes))
    except InfeasibleBudget as refusal:
        budget = smallest(refusal)
    method.prepare(shapes, Budget.parse(budget, shapes), there.found.get(repr(method.needs())))
    cache = KVCache(shapes, method, dtype=torch.float32)
    images = there.model.generate(there.prompts, cache, PromptNoise(0, (0, 1)))
    assert images.dtype == torch.uint8
    assert images.shape[0] == 2
    varied = images.flatten(1).float().std(1) > 1
    assert varied.any() if (name, spec) in UNIFORM else varied.all()
    if method.strict:
        assert 0 < cache.ledger.peak_tokens <= method.budget.capacity


def test_every_method_is_covered() -> None:
    assert {"full", "heatkv", "scalekv", "snapkv", "h2o", "hack", "ams_kv", "rkv"} <= set(METHODS)
    assert {"linear_ar", "headkv", "streaming_llm", "pricekv", "hackpp", "hard_kv"} <= set(METHODS)
    assert {"diagonal", "swa", "heatkv_naive", "hard_kv/rkv_top_p", "pricekv/by_token"} <= set(
        list_variants()
    )
    exempt = set(METHODS) - set(STRICT) - {"full"}
    assert all(settings_of(name).strict is False for name in exempt)


def test_the_families_of_the_shapes_are_listed() -> None:
    assert {spec: spec_of(spec).family for spec in SPECS} == FAMILIES
