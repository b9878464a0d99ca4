"""Contract of every method, plugins' included: eight properties of one driven generation (`tests/support/conformance`).

A batch of three prompts is generated once for each method and shapes, under a budget that the batch does not fit.
Further settings of a class are driven too.
"""

from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.tape import Tape
from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec
from kvbench.core.storage import CHANNEL
from kvbench.engine.coding.formats import Packing
from kvbench.engine.schedule import predict_row_lengths
from kvbench.methods.full import Full
from kvbench.methods.shared import plans
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.wrapper import Wrapper
from tests.support.conformance import (
    BATCH,
    LATER,
    LAYERS,
    NAMES,
    PROMPTS,
    SCALES,
    SPECS,
    Generation,
    describe,
    fits,
    generate,
    open_cache,
    parse_budget,
    prepare,
    smallest,
)
from tests.support.engine import D, prepared
from tests.support.methods import GUESTS, class_of
from tests.support.places import ROOT
from tests.support.steps import KERNEL, decode

pytest.importorskip("triton")

EVERY = [(name, shapes) for name in NAMES for shapes in SPECS]
CASES = [case for case in EVERY if fits(*case)]
RECORDED = ("meda/official_clamp", "meda/variance", "pricekv/blocks", "vase/attn")
"""Further settings with other rows or needs than their class is recorded with; `make test` records these alone."""


def list_shipped() -> set[str]:
    """Names of the methods in conf/method."""
    return {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} - {*GUESTS}


@dataclass
class Driven:
    """The generation of a batch by a method."""

    name: str
    shapes: str
    batch: Generation

    @property
    def method(self) -> Method:
        return self.batch.cache.method

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of each prompt, or of the first map."""
        return (1, 1, 1) if self.shapes == "small" else PROMPTS


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def driven(request: pytest.FixtureRequest) -> Driven:
    name, shapes = request.param
    return Driven(name, shapes, generate(open_cache(prepare(name, shapes))))


def test_the_budget_holds_after_every_layer_and_is_used(driven: Driven) -> None:
    method, ledger = driven.method, driven.batch.ledger
    if isinstance(method, Full) or not method.strict:
        return
    capacity, spec = method.budget.capacity, SPECS[driven.shapes]
    sequences = len(PROMPTS) * spec.branches
    assert all(tokens <= capacity for row in ledger.tokens_after for tokens in row)
    assert 0.4 * capacity < ledger.peak_tokens
    assert ledger.peak_bytes <= float(capacity) * 2 * D * 4 * sequences
    if method.static and driven.shapes == "small":  # every sequence is alike: tokens counted are bytes held
        assert ledger.peak_bytes == ledger.peak_tokens * 2 * D * 4 * sequences
    for found in driven.batch.prompts.values():
        held = [sum(map(len, rows)) / spec.branches for rows in found.kept]
        steps = [sum(held[start : start + LAYERS]) for start in range(0, len(held), LAYERS)]
        assert max(steps) <= capacity


def test_rows_have_the_predicted_lengths(driven: Driven) -> None:
    spec = SPECS[driven.shapes]
    for prompt, found in driven.batch.prompts.items():
        plan = driven.method.plan_for(driven.prompts[prompt])
        predicted = predict_row_lengths(plan.spec, plan)
        if predicted is None:
            return  # the data decides, which is allowed: see below for the methods that ship
        for place, rows in enumerate(found.kept):
            lengths = predicted[divmod(place, LAYERS)].tolist()
            assert [len(row) for row in rows] == lengths * spec.branches


def count_protected(method: Method, spec: ModelSpec) -> int:
    """Tokens that a method's settings keep for ever: the first of a text, or of its first segments."""
    return max(getattr(method, "leading", 0), spec.leading_tokens(getattr(method, "sinks", 0)))


def test_what_never_leaves_is_always_there(driven: Driven) -> None:
    if driven.name == "hack":
        return  # its contextual heads choose among the first scales too
    for prompt, found in driven.batch.prompts.items():
        spec = driven.method.plan_for(driven.prompts[prompt]).spec
        protected = count_protected(driven.method, spec)
        for place, rows in enumerate(found.kept):
            present = min(protected, spec.ends[place // LAYERS])
            assert all(row[:present] == [*range(present)] for row in rows)


def agree(found: Generation, expected: Generation, prompt: int, otherwise: str | None = None) -> None:
    one, other = found.prompts[prompt], expected.prompts[prompt]
    assert one.kept == other.kept, otherwise
    assert one.use.least_share == other.use.least_share
    torch.testing.assert_close(one.outputs, other.outputs, atol=1e-5, rtol=1e-4)


def test_a_prompt_is_the_same_alone_and_another_batch_leaves_nothing_behind(driven: Driven) -> None:
    """Behind any padding, beside any prompts, and in a cache that held a larger batch before."""
    used = driven.batch.cache
    for prompt in BATCH:
        method = prepare(driven.name, driven.shapes, prompt=driven.prompts[prompt])
        alone = generate(open_cache(method), [prompt])
        changed = f"{driven.name} keeps other tokens when its prompt is alone: it depends on other rows or on padding"
        agree(driven.batch, alone, prompt, changed)
        agree(generate(used, [prompt]), alone, prompt)


def test_prompts_of_a_run_fit_where_the_longest_of_the_model_would_not(driven: Driven) -> None:
    """The method is prepared for the longest prompt of the run."""
    if driven.shapes != "small":
        method = prepare(driven.name, driven.shapes, prompt=PROMPTS[1])
        found = generate(open_cache(method, SPECS[driven.shapes]), BATCH[1:])
        for prompt in BATCH[1:]:
            agree(found, driven.batch, prompt)


def test_four_bits_hold_less(driven: Driven) -> None:
    """Every method decides, stores and attends with codes; one that looks at positions alone keeps the same."""
    method, wide = prepare(driven.name, driven.shapes), driven.batch
    if method.uses.replaces or method.uses.precisions:
        return  # refused, or stored as it says itself
    narrow = generate(open_cache(method, packing=Packing(4, CHANNEL)))
    if method.strict:
        assert narrow.ledger.peak_tokens <= method.budget.capacity
    assert narrow.ledger.sequence_bytes < wide.ledger.sequence_bytes * 0.6
    for prompt in BATCH:
        found, expected = narrow.prompts[prompt], wide.prompts[prompt]
        assert all(torch.isfinite(one).all() for one in found.outputs)
        if method.static:
            assert found.kept == expected.kept
        if driven.shapes == "small":  # nothing was stored at the first map
            torch.testing.assert_close(found.outputs[:LAYERS], expected.outputs[:LAYERS])


@pytest.mark.parametrize(
    "driven",
    [
        case
        if case[0] in RECORDED or ("/" not in case[0] and case[1] != "prompt")
        else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
    indirect=True,
    scope="module",
    ids="-".join,
)
def test_what_is_recorded_is_what_runs_by_launches(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape stands for a CUDA graph, and torch for the one-token kernel; the last batch has no padding."""
    monkeypatch.setattr(KERNEL, decode)
    tape, name, shapes = Tape(), driven.name, driven.shapes
    single, recorded = (open_cache(prepare(name, shapes), record=record) for record in (None, tape))
    if recorded.repetitions is None:
        assert recorded.method.uses.sparse_reads or recorded.method.graph_obstacle is not None
        return
    batches = ((0, 1), (2, 1), (0, 0)) if shapes == "small" else ((2, 1), (0, 0))
    for batch in batches:
        with torch.inference_mode():  # as models generate
            expected, found = (generate(cache, batch, in_steps=True) for cache in (single, recorded))
        if not recorded.method.budgeted and shapes != "small":  # grows in place
            ledger = recorded.ledger
            assert ledger.rebuild_bytes == ledger.peak_bytes < single.ledger.rebuild_bytes
            ledger.rebuild_bytes = single.ledger.rebuild_bytes
        assert recorded.ledger == single.ledger
        for prompt in batch:
            agree(found, expected, prompt)
    if shapes != "small":  # segments and generations repeat one recording; the first step compiles kernels
        tables = 1 + recorded.method.static  # rows that are alike in all sequences share one
        assert (tape.recorded, tape.repeated) == (tables, 2 * sum(LATER) - tables)
    else:
        assert (tape.recorded, tape.repeated) == (len(SCALES), 2 * len(SCALES))


@cache
def generate_full(shapes: str) -> Generation:
    return generate(open_cache(prepared(Full(), SPECS[shapes])))


def test_the_whole_budget_is_equal_to_full(driven: Driven) -> None:
    found, full = generate(open_cache(prepare(driven.name, driven.shapes, "1"))), generate_full(driven.shapes)
    method, ledger = found.cache.method, found.ledger
    if method.uses.sparse_reads or (
        not method.strict and ledger.peak_tokens < SPECS[driven.shapes].full_tokens
    ):
        return  # what it leaves out without a budget, it always leaves out
    assert ledger.peak_tokens == full.ledger.peak_tokens == SPECS[driven.shapes].full_tokens
    for prompt in BATCH:
        one, other = found.prompts[prompt].outputs, full.prompts[prompt].outputs
        if method.static:
            assert all(map(torch.equal, one, other))
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "shapes"), [case for case in EVERY if SPECS[case[1]].family not in class_of(case[0]).families]
)
def test_a_model_of_another_family_is_refused(name: str, shapes: str) -> None:
    method, spec = copy(describe(name, shapes)), SPECS[shapes]
    told = f"method={method.title}: is for .* and {spec.name} is a {spec.family} model; use one of"
    for refuse in (method.check, method.prepare):
        with pytest.raises(ValueError, match=told):
            refuse(spec, Budget.parse("0.5", spec))


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_a_budget_too_small_is_refused_before_any_work(name: str, shapes: str) -> None:
    method, spec = copy(describe(name, shapes)), SPECS[shapes]
    if isinstance(method, Full) or not method.strict:
        return
    little = Budget.parse(str(Fraction(1, 2 * spec.cached_length)), spec)
    with pytest.raises(InfeasibleBudget, match="the smallest feasible budget is ") as refused:
        method.check(spec, little)
    with pytest.raises(InfeasibleBudget, match="the smallest feasible budget is "):
        method.prepare(spec, little)  # before it asks for a calibration
    minimum = Budget.parse(smallest(refused.value), spec)
    method.check(spec, minimum)
    protected = PROMPTS[0] if shapes == "prompt" else 0
    assert minimum.per_head - protected <= 0.25 * spec.cached_length


@pytest.mark.slow
@given(
    st.sampled_from([case for case in CASES if class_of(case[0]) is not Full]),
    st.fractions(Fraction(1, 50), 1, max_denominator=500),
)
@settings(max_examples=100, deadline=None)
def test_any_budget_holds(case: tuple[str, str], share: Fraction) -> None:
    found = generate(open_cache(prepare(*case, str(share))))
    method, ledger = found.cache.method, found.ledger
    assert not method.strict or ledger.peak_tokens <= method.budget.capacity


def test_first_tokens_are_counted_in_the_smallest_budget() -> None:
    spec = SPECS["text"]
    for name in ("h2o", "heatkv", "pricekv/blocks", "headkv", "streaming_llm"):
        with pytest.raises(InfeasibleBudget, match="need 4 of"):
            describe(name, "text", leading=4).check(spec, parse_budget("3", spec))


def test_a_prompt_longer_than_those_of_the_run_is_refused() -> None:
    cache = open_cache(prepare("h2o", "text", prompt=PROMPTS[1]), SPECS["text"])
    for padding in ([8, 6], None):
        with pytest.raises(ValueError, match=r"padding .*: the method was prepared .* 7 padding tokens"):
            cache.reset(2, padding)


def test_a_long_run_holds_the_plans_of_a_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 1)
    cache = open_cache(prepare("chunkkv", "text"))
    method, first = cache.method, generate(cache)
    assert isinstance(method, Wrapper)
    assert sorted(method._plans) == sorted(method.base._plans) == [9, 17]
    again = generate(cache, [2])
    assert list(method._plans) == list(method.base._plans) == [9]
    assert again.prompts[2].kept == first.prompts[2].kept


def test_data_decides_the_lengths_of_few_methods() -> None:
    homes = {
        name: next(shapes for shapes in ("small", "text") if fits(name, shapes)) for name in list_shipped()
    }
    prepared_ = {name: prepare(name, shapes) for name, shapes in homes.items()}
    unknown = sorted(name for name, one in prepared_.items() if predict_row_lengths(one.spec, one) is None)
    assert unknown == ["adakv", "ams_kv", "critical_adakv", "expected_attention", "hard_kv", "headkv"]
    assert all(prepared_[name].graph_obstacle is not None for name in unknown)
