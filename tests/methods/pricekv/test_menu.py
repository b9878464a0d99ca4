"""Lifetimes and precisions together: exact at given prices, never above the capacity, close to the best of all."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.methods.pricekv.allocate import allocate
from kvbench.methods.pricekv.prices import choose, find_prices
from kvbench.methods.pricekv.problem import Holding, Ints, Problem, count_held, sum_error
from tests.methods.pricekv.test_allocation import random_problem

Life = tuple[int, int]
"""The last consumer that has a source, and the precision in which it is held."""


def with_menu(problem: Problem, sizes: list[int], seed: int, scale: float = 0.1) -> Problem:
    """The same problem with precisions of so many units a token; smaller ones cost more at every consumer."""
    generator, sources = np.random.default_rng(seed), problem.segments - 1
    shape = (sources, len(sizes), problem.segments, problem.heads)
    noise = np.sort(generator.random(shape) * scale, 1)
    among = np.array([[source in some for some in problem.sources] for source in range(sources)])
    noise *= among[:, None, :, None]
    return replace(
        problem,
        sizes=problem.sizes * np.array(sizes),
        noise=noise.cumsum(2),
        capacity=problem.capacity * max(sizes) // 2,
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 4) -> Problem:
    segments, layers = draw(st.integers(2, most)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 6), min_size=segments, max_size=segments))
    recent, forced = draw(st.sampled_from([1, most])), draw(st.integers(0, segments - 1))
    seed, room = draw(st.integers(0, 10**6)), draw(st.integers(0, 20))
    plain = random_problem(lengths, layers, draw(st.integers(1, 2)), seed, room, 0, recent)
    menu = draw(st.sampled_from([[4], [4, 1], [8, 4, 3]]))
    problem = with_menu(plain, menu, seed)
    least = int(problem.sizes[:forced, -1].sum()) * problem.heads
    return force(replace(problem, capacity=problem.capacity.clip(least)), forced)


def force(problem: Problem, forced: int) -> Problem:
    errors = tuple(of_sets.copy() for of_sets in problem.errors)
    for of_sets, sources in zip(errors, problem.sources, strict=True):
        must = sum(1 << bit for bit, source in enumerate(sources) if source < forced)
        of_sets[np.arange(len(of_sets)) & must != must] = np.inf
    return replace(problem, errors=errors, forced=forced)


def lives(problem: Problem) -> Iterator[tuple[Life, ...]]:
    """All lifetimes and precisions of one head; a source outlives no consumer that has it among its sources."""
    options = []
    for source in range(problem.segments - 1):
        ends = [k for k in range(source + 1, problem.segments) if source in problem.sources[k]]
        options.append([(source, 0), *product(ends, range(problem.precisions))])
    return product(*options)


def pay(problem: Problem, life: tuple[Life, ...], head: int) -> float:
    """What one head pays in errors and noise, consumer by consumer."""
    paid = 0.0
    for k, sources in enumerate(problem.sources):
        has = [life[source][0] >= k for source in sources]
        paid += float(problem.errors[k][sum(there << bit for bit, there in enumerate(has)), head])
        for source, there in zip(sources, has, strict=True):
            if there:
                noise = problem.noise[source, life[source][1], :, head]
                paid += float(noise[k] - noise[k - 1])
    return paid


def occupy(problem: Problem, life: tuple[Life, ...], layer: int) -> Ints:
    """Room that one head takes at each instant, walking through time."""
    taken, instant = np.zeros(len(problem.capacity), np.int64), 0
    for k in range(problem.segments):
        for ran in range(problem.layers + 1):
            finds = min(k + (ran > layer), problem.segments - 1)  # the consumer that comes next in this layer
            for source, (until, precision) in enumerate(life):
                taken[instant] += problem.sizes[source, precision] * (source < finds <= until)
            instant += 1
    return taken


def lives_of(holding: Holding) -> list[tuple[Life, ...]]:
    rows = zip(holding.until.tolist(), holding.precision.tolist(), strict=True)
    return [tuple(zip(until, precision, strict=True)) for until, precision in rows]


def count(problem: Problem, holding: Holding) -> Ints:
    of_heads = (
        occupy(problem, life, int(layer))
        for life, layer in zip(lives_of(holding), problem.layer, strict=True)
    )
    return np.sum(list(of_heads), 0)


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_at_given_prices_every_head_has_the_best_lifetimes_and_forms(problem: Problem, seed: int) -> None:
    prices = np.random.default_rng(seed).random(len(problem.capacity)) * 0.01
    for head, life in enumerate(lives_of(choose(problem, prices))):
        layer = int(problem.layer[head])

        def cost(of: tuple[Life, ...], head: int = head, layer: int = layer) -> float:
            return pay(problem, of, head) + float(prices @ occupy(problem, of, layer))

        assert cost(life) == pytest.approx(min(map(cost, lives(problem))))


@given(problems(5))
@settings(max_examples=60, deadline=None)
def test_forms_fit_at_every_instant_and_no_larger_one_would_fit_and_save_anything(problem: Problem) -> None:
    holding, last = allocate(problem), problem.segments - 1
    held = count(problem, holding)
    assert (held == count_held(problem, holding)).all()
    assert (held <= problem.capacity).all()
    assert (holding.until[:, : problem.forced] == last).all()
    least = sum_error(problem, holding)
    assert least == pytest.approx(
        sum(pay(problem, life, head) for head, life in enumerate(lives_of(holding)))
    )
    for head, source in product(range(problem.heads), range(problem.forced, last)):
        lived = holding.until[head, source]
        now = problem.sizes[source, holding.precision[head, source]] if lived > source else 0
        for end, precision in product(
            range(max(lived, source + 1), problem.segments), range(problem.precisions)
        ):
            other = Holding(holding.until.copy(), holding.precision.copy())
            other.until[head, source], other.precision[head, source] = end, precision
            grows = end > lived or problem.sizes[source, precision] > now
            if (
                grows
                and problem.sizes[source, precision] >= now
                and (count(problem, other) <= problem.capacity).all()
            ):
                assert sum_error(problem, other) > least


def test_the_allocation_is_close_to_the_best_of_all_and_to_a_bound_that_none_can_beat() -> None:
    problem = with_menu(random_problem([1, 2, 3, 4], 1, 2, seed=1, room=6), [4, 2, 1], seed=1)
    every = list(lives(problem))
    used = np.array([occupy(problem, life, 0) for life in every])
    paid = [np.array([pay(problem, life, head) for life in every]) for head in range(2)]
    fits = (used[:, None] + used <= problem.capacity).all(-1)
    best = float(np.where(fits, paid[0][:, None] + paid[1], np.inf).min())
    prices = find_prices(problem)
    bound = sum(float((of_head + used @ prices).min()) for of_head in paid) - float(prices @ problem.capacity)
    assert bound <= best + 1e-9
    assert best - 1e-9 <= sum_error(problem, allocate(problem)) <= 1.1 * best


def test_one_form_is_the_plain_allocation_at_a_scaled_capacity() -> None:
    plain = random_problem([1, 2, 3, 4, 4], 2, 4, seed=3, room=40)
    scaled = replace(plain, sizes=8 * plain.sizes, capacity=8 * plain.capacity)
    whole, eighths = allocate(plain), allocate(scaled)
    assert (whole.until == eighths.until).all()
    noisy = with_menu(plain, [8], seed=0, scale=0)
    assert (allocate(replace(noisy, capacity=8 * plain.capacity)).until == whole.until).all()
