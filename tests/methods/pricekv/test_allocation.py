"""Lifetimes and precisions: exact at given prices, never above the capacity, no capacity left that could be used."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.methods.pricekv.allocate import allocate
from kvbench.methods.pricekv.local_search import exchange, lengthen
from kvbench.methods.pricekv.prices import minimize_lagrangian
from kvbench.methods.pricekv.problem import (
    Allocation,
    Problem,
    make_zero_noise,
    measure_usage,
    sum_error,
)
from kvbench.methods.shared.capacities import Ints

Life = tuple[int, int]
"""The last consumer that has a source, and the precision in which it is held."""


def random_problem(
    lengths: list[int], layers: int, per_layer: int, seed: int, room: int, forced: int = 0, recent: int = 9
) -> Problem:
    generator, heads = np.random.default_rng(seed), layers * per_layer
    sources = tuple(tuple(i for i in range(k) if i == 0 or i >= k - recent) for k in range(len(lengths)))
    errors = [generator.random((1 << len(some), heads)) for some in sources]
    for of_sets, some in zip(errors, sources, strict=True):
        must = sum(1 << bit for bit, source in enumerate(some) if source < forced)
        of_sets[-1] = 0
        of_sets[np.arange(len(of_sets)) & must != must] = np.inf
    instants = len(lengths) * (layers + 1)
    capacity = room + heads * sum(lengths[:forced]) + generator.integers(0, 3, instants)
    sizes, noise = np.array(lengths[:-1])[:, None], make_zero_noise(len(lengths), heads)
    return Problem(tuple(errors), sources, sizes, noise, layers, capacity, forced)


def with_menu(problem: Problem, sizes: list[int], seed: int, scale: float = 0.1) -> Problem:
    """The same problem with precisions of so many units a token; smaller ones cost more at every consumer."""
    generator, sources = np.random.default_rng(seed), problem.segments - 1
    shape = (sources, len(sizes), problem.segments, problem.heads)
    noise = np.sort(generator.random(shape) * scale, 1)
    among = np.array([[source in some for some in problem.sources] for source in range(sources)])
    noise *= among[:, None, :, None]
    floor = int(problem.sizes[: problem.forced].sum()) * min(sizes) * problem.heads
    return replace(
        problem,
        sizes=problem.sizes * np.array(sizes),
        noise=noise.cumsum(2),
        capacity=(problem.capacity * max(sizes) // 2).clip(floor),
    )


@st.composite
def problems(draw: st.DrawFn, max_segments: int = 5) -> Problem:
    segments, layers = draw(st.integers(2, max_segments)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 6), min_size=segments, max_size=segments))
    recent, forced = draw(st.sampled_from([1, 2, max_segments])), draw(st.integers(0, segments - 1))
    per_layer, seed, room = draw(st.integers(1, 2)), draw(st.integers(0, 10**6)), draw(st.integers(0, 20))
    plain = random_problem(lengths, layers, per_layer, seed, room, forced, recent)
    menu = draw(st.sampled_from([None, [4], [4, 1], [8, 4, 3]]))
    return plain if menu is None else with_menu(plain, menu, seed)


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
    """Capacity that one head takes at each instant, walking through time."""
    taken, instant = np.zeros(len(problem.capacity), np.int64), 0
    for k in range(problem.segments):
        for ran in range(problem.layers + 1):
            finds = min(k + (ran > layer), problem.segments - 1)  # the consumer that comes next in this layer
            for source, (until, precision) in enumerate(life):
                taken[instant] += problem.sizes[source, precision] * (source < finds <= until)
            instant += 1
    return taken


def lives_of(holding: Allocation) -> list[tuple[Life, ...]]:
    rows = zip(holding.until.tolist(), holding.precision.tolist(), strict=True)
    return [tuple(zip(until, precision, strict=True)) for until, precision in rows]


def pay_all(problem: Problem, holding: Allocation) -> float:
    return sum(pay(problem, life, head) for head, life in enumerate(lives_of(holding)))


def count(problem: Problem, holding: Allocation) -> Ints:
    each = zip(lives_of(holding), problem.layer.tolist(), strict=True)
    return np.sum([occupy(problem, life, layer) for life, layer in each], 0)


@given(problems(4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_at_given_prices_every_head_has_the_best_of_all_lifetimes(problem: Problem, seed: int) -> None:
    prices = np.random.default_rng(seed).random(len(problem.capacity)) * 0.02
    every = list(lives(problem))
    rents = [
        [float(prices @ occupy(problem, life, layer)) for life in every] for layer in range(problem.layers)
    ]
    for head, found in enumerate(lives_of(minimize_lagrangian(problem, prices))):
        layer = int(problem.layer[head])
        best = min(pay(problem, life, head) + rent for life, rent in zip(every, rents[layer], strict=True))
        assert pay(problem, found, head) + prices @ occupy(problem, found, layer) == pytest.approx(best)


@given(problems())
@settings(max_examples=80, deadline=None)
def test_what_is_held_fits_and_nothing_is_left_out_that_fits_and_does_no_harm(problem: Problem) -> None:
    holding, last = allocate(problem), problem.segments - 1
    until, held = holding.until, count(problem, holding)
    assert (held == measure_usage(problem, holding)).all()
    assert (held <= problem.capacity).all()
    assert ((until >= np.arange(last)) & (until <= last)).all()
    assert (until[:, : problem.forced] == last).all()
    best = sum_error(problem, holding)
    assert np.isfinite(best)
    assert best == pytest.approx(pay_all(problem, holding))
    for head, source in product(range(problem.heads), range(problem.forced, last)):
        lived, sizes = until[head, source], problem.sizes[source]
        now = sizes[holding.precision[head, source]] if lived > source else 0
        for end, precision in product(range(max(lived, source + 1), last + 1), range(problem.precisions)):
            grows = sizes[precision] >= now and (end > lived or sizes[precision] > now)
            if grows:
                other = Allocation(until.copy(), holding.precision.copy())
                other.until[head, source], other.precision[head, source] = end, precision
                if (count(problem, other) <= problem.capacity).all():
                    assert sum_error(problem, other) > best


def test_the_allocation_is_close_to_the_best_of_all() -> None:
    problem = with_menu(random_problem([1, 2, 3, 4], 1, 2, seed=1, room=6), [4, 2, 1], seed=1)
    every = list(lives(problem))
    used = np.array([occupy(problem, life, 0) for life in every])
    paid = [np.array([pay(problem, life, head) for life in every]) for head in range(2)]
    fits = (used[:, None] + used <= problem.capacity).all(-1)
    best = float(np.where(fits, paid[0][:, None] + paid[1], np.inf).min())
    assert best - 1e-9 <= sum_error(problem, allocate(problem)) <= 1.1 * best


def test_what_one_change_cannot_use_an_exchange_does() -> None:
    # Two heads, whose block of 3 saves 4 and of 4 saves 5, and room for 4: the 3 alone leaves a token that nothing
    # fits into, until it goes and the 4 comes.
    errors = (np.zeros((1, 2)), np.zeros((2, 2)), np.array([[9.0, 9], [5, 5], [4, 4], [0, 0]]))
    sizes, noise = np.array([[3], [4]]), make_zero_noise(3, 2)
    problem = Problem(errors, ((), (0,), (0, 1)), sizes, noise, 1, np.full(6, 4))
    three = Allocation(np.array([[2, 1], [0, 1]]), np.zeros((2, 2), int))
    assert (lengthen(problem, three).until == three.until).all()
    exchanged = exchange(problem, three, np.full(6, 0.1))
    assert (sum_error(problem, three), sum_error(problem, exchanged)) == (14, 13)
    assert count(problem, exchanged).max() == 4


def test_what_is_forced_must_fit() -> None:
    problem = random_problem([2, 3, 4], 1, 2, seed=0, room=-3, forced=2)
    with pytest.raises(ValueError, match="the fixed and forced sources alone exceed the capacity"):
        allocate(problem)
