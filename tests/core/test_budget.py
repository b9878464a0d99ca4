"""Budgets in bytes: exact, monotonic, the same as tokens where all have 16-bit numbers; shapes after another prompt."""

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.budget import Budget, InfeasibleBudget, find_capacity
from kvbench.core.segments import ModelSpec, next_scale, next_token

SPEC = ModelSpec("small", 4, 6, 8, next_scale([(side, side) for side in (1, 2, 3, 5, 8)]))
TOKEN = 2 * 8 * 2
"""Bytes of a key and a value of 8 channels in 16 bits."""

decimals = st.decimals(Decimal("0.0001"), Decimal(1), places=4)
sizes = st.integers(1, 64)


@given(decimals)
def test_in_16_bits_bytes_and_tokens_are_one_budget(value: Decimal) -> None:
    tokens, both = Budget.parse(str(value), SPEC), Budget.parse_bytes(str(value), SPEC, TOKEN)
    assert both.capacity == tokens.capacity
    assert both.share == tokens.share == Fraction(value)
    assert both.bytes == tokens.capacity * TOKEN
    assert (both.unit, tokens.unit) == ("bytes", "tokens")
    assert both.exact != tokens.exact


@given(decimals, sizes)
def test_capacity_is_exact_and_never_more_than_there_is(value: Decimal, size: int) -> None:
    budget = Budget.parse_bytes(str(value), SPEC, size)
    assert budget.bytes == Fraction(value) * 24 * 39 * TOKEN
    assert budget.tokens * size <= budget.bytes
    if budget.capacity < SPEC.full_tokens:
        assert budget.capacity * size == budget.bytes
        assert (budget.tokens + 1) * size > budget.bytes
    else:
        assert SPEC.full_tokens * size <= budget.bytes


@given(st.integers(2, 24 * 39 * TOKEN))
def test_a_whole_number_counts_bytes_of_a_sequence(size: int) -> None:
    budget = Budget.parse_bytes(size, SPEC, TOKEN)
    assert budget.bytes == size
    assert budget.share * SPEC.full_bytes == size
    assert budget.tokens == size // TOKEN


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("much", "give a fraction in .0, 1. or a number of bytes of a sequence"),
        ("-1", "must be positive"),
        ("2.5", "above 1 it is a number of bytes of a sequence and must be whole"),
        ("29953", "a sequence of small has at most 29952 bytes in 16 bits"),
    ],
)
def test_what_is_no_number_of_bytes_is_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^budget={value} budget_unit=bytes: {message}"):
        Budget.parse_bytes(value, SPEC, TOKEN)


@given(decimals, st.sampled_from((16, 32, 64)), st.sampled_from((1, 2, 3, 6)))
def test_shares_of_the_heads_have_all_bytes_together(value: Decimal, size: int, count: int) -> None:
    budget = Budget.parse_bytes(str(value), SPEC, size)
    parts = [budget.take_share(SPEC, SPEC.take_share(rank, count)) for rank in range(count)]
    held = [part.bytes for part in parts if part.bytes is not None]
    assert sum(held) == budget.bytes
    assert sum(part.tokens for part in parts) == budget.tokens
    assert all(part.tokens * size <= has for part, has in zip(parts, held, strict=True))
    assert sum(part.full_bytes or 0 for part in parts) == SPEC.full_bytes


@given(decimals.filter(lambda value: value < Decimal("0.02")), st.sampled_from((16, 32, 64)))
def test_the_smallest_feasible_budget_is_named_in_its_own_unit(value: Decimal, size: int) -> None:
    budget = Budget.parse_bytes(str(value), SPEC, size)
    message = str(InfeasibleBudget.of(budget, 2, SPEC, "two tokens"))
    few = budget.bytes > 1 and budget.share < Fraction(1, 1000)
    assert message.startswith(f"budget={float(budget.bytes if few else value):g} budget_unit=bytes: ")
    named = message.rsplit(" ", 1)[1]
    assert Budget.parse_bytes(named, SPEC, size).head_tokens >= 2
    assert Budget.parse_bytes(str(float(named) - 2e-5), SPEC, size).head_tokens < 2


@given(decimals, st.integers(1, 40), st.integers(0, 40), st.integers(0, 30000))
def test_bisection_finds_the_most_tokens_that_fit(value: Decimal, size: int, more: int, extra: int) -> None:
    """Tokens are `size` bytes, and `more` where they lie in the first `extra`: what a plan holds is monotonic."""
    budget = Budget.parse_bytes(str(value), SPEC, size + more)

    def plan(one: Budget) -> int:
        return one.tokens * size + min(one.tokens, extra) * more

    found = find_capacity(budget, size, plan)
    assert found.capacity >= budget.capacity
    assert found.bytes == budget.bytes
    fitting = [n for n in range(SPEC.full_tokens + 1) if n * size + min(n, extra) * more <= budget.bytes]
    assert found.tokens == max(fitting)


@given(decimals, st.lists(st.integers(0, 500), min_size=1, max_size=1000))
def test_bisection_fits_although_more_capacity_may_hold_less(value: Decimal, waste: list[int]) -> None:
    """Whole blocks leave some of a capacity unused, one more than another."""
    budget = Budget.parse_bytes(str(value), SPEC, TOKEN)

    def plan(one: Budget) -> int:
        return max(0, one.tokens - waste[one.tokens % len(waste)]) * TOKEN // 4

    found = find_capacity(budget, TOKEN // 4, plan)
    assert plan(found) <= budget.bytes
    assert found.capacity >= budget.capacity


def test_bisection_passes_over_capacities_that_a_method_cannot_work_with() -> None:
    budget = Budget.parse_bytes("0.01", SPEC, TOKEN)

    def plan(one: Budget) -> int:
        if one.tokens < 30:
            raise InfeasibleBudget("too small")
        return one.tokens * 4

    assert budget.tokens == 9
    assert find_capacity(budget, 4, plan).tokens == int(budget.bytes or 0) // 4 == 74


def test_a_refusal_of_a_text_names_the_prompt_and_the_budget_as_given() -> None:
    spec = ModelSpec("text", 2, 2, 8, next_token(512, [128, 128]), branches=1)
    own = InfeasibleBudget.of_sinks(Budget.parse(256, spec), 2, 640, replace(spec, padding_counts=False))
    assert str(own).endswith("the smallest feasible budget is 640, or set sinks=0")
    assert "2 sink segments" in str(InfeasibleBudget.of_sinks(Budget.parse(256, spec), 2, 640, spec))
    error = InfeasibleBudget.of_sinks(Budget.parse(256, spec), 1, 512, spec)
    assert str(error).startswith(
        "budget=256: the tokens of the longest prompt, model.prompt_tokens=512, need 512 of 640"
    )


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_shapes_of_another_prompt_are_those_drawn_after_it(tokens: int) -> None:
    spec = ModelSpec("some", 1, 1, 8, next_token(5, [8, 8, 7]))
    assert spec.with_prompt(tokens).segments == next_token(tokens, [8, 8, 7])
