"""Lifetimes: exact at given prices, never above the capacity, and no room is left that could be used."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.methods.pricekv.allocate import allocate
from kvbench.methods.pricekv.exchange import exchange
from kvbench.methods.pricekv.prices import choose, find_prices
from kvbench.methods.pricekv.problem import Holding, Ints, Problem, be_noiseless, count_held, sum_error
from kvbench.methods.pricekv.trade import lengthen, shorten

Chain = tuple[int, ...]
"""Set of sources, by their own numbers, that a head holds at each consumer."""


def chains(problem: Problem, held: int = 0, consumer: int = 1) -> Iterator[Chain]:
    """All chains from a consumer on: what is held next is of what is held, and the newest segment."""
    if consumer == problem.segments:
        yield ()
        return
    may_hold = (held | 1 << (consumer - 1)) & sum(1 << source for source in problem.sources[consumer])
    for subset in range(1 << consumer):
        if subset & ~may_hold == 0:
            for rest in chains(problem, subset, consumer + 1):
                yield (subset, *rest)


def tokens(problem: Problem, subset: int) -> int:
    return sum(int(length) for i, length in enumerate(problem.sizes[:, 0]) if subset >> i & 1)


def error(problem: Problem, chain: Chain, head: int) -> float:
    """Sum what a head's sets cost, each looked up among the sources of its consumer."""
    return sum(
        float(
            problem.errors[k][sum((subset >> i & 1) << bit for bit, i in enumerate(problem.sources[k])), head]
        )
        for k, subset in enumerate(chain, start=1)
    )


def occupied(problem: Problem, chain: Chain, layer: int) -> list[int]:
    """Tokens that a head of a layer has in the cache at each instant, walking through time."""
    sets = (0, *chain)
    return [
        tokens(problem, sets[min(k + (ran > layer), problem.segments - 1)])
        for k in range(problem.segments)
        for ran in range(problem.layers + 1)
    ]


def chains_of(until: Ints) -> list[Chain]:
    return [
        tuple(sum(1 << i for i, last in enumerate(lives) if i < k <= last) for k in range(1, len(lives) + 1))
        for lives in until.tolist()
    ]


def error_of(problem: Problem, until: Ints) -> float:
    return sum(error(problem, chain, head) for head, chain in enumerate(chains_of(until)))


def held_by(problem: Problem, until: Ints) -> Ints:
    of_heads = [occupied(problem, chain, int(problem.layer[h])) for h, chain in enumerate(chains_of(until))]
    return np.array(of_heads).sum(0)


@st.composite
def problems(draw: st.DrawFn, most: int = 5) -> Problem:
    segments, layers = draw(st.integers(2, most)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 6), min_size=segments, max_size=segments))
    recent, forced = draw(st.sampled_from([1, 2, most])), draw(st.integers(0, segments - 1))
    per_layer, seed, room = draw(st.integers(1, 2)), draw(st.integers(0, 10**6)), draw(st.integers(0, 20))
    return random_problem(lengths, layers, per_layer, seed, room, forced, recent)


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
    sizes, noise = np.array(lengths[:-1])[:, None], be_noiseless(len(lengths), heads)
    return Problem(tuple(errors), sources, sizes, noise, layers, capacity, forced)


@given(problems(4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_at_given_prices_every_head_has_the_best_of_all_chains(problem: Problem, seed: int) -> None:
    prices = np.random.default_rng(seed).random(len(problem.capacity)) * 0.02

    def cost(chain: Chain, head: int) -> float:
        rent = prices @ np.array(occupied(problem, chain, int(problem.layer[head])))
        return error(problem, chain, head) + float(rent)

    def is_constant(chain: Chain) -> bool:
        return all(subset == chain[-1] & (1 << k) - 1 for k, subset in enumerate(chain, start=1))

    every = list(chains(problem))
    whole = all(len(some) == k for k, some in enumerate(problem.sources))
    for lifetimes in (True, False) if whole else (True,):
        found = chains_of(choose(problem, prices, lifetimes=lifetimes).until)
        for head, chain in enumerate(found):
            assert chain in every
            best = min(cost(other, head) for other in every if lifetimes or is_constant(other))
            assert cost(chain, head) == pytest.approx(best)


@given(problems(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_lifetimes_fit_and_no_block_is_left_out_that_fits_and_does_no_harm(
    problem: Problem, lifetimes: bool
) -> None:
    lifetimes |= any(len(some) < k for k, some in enumerate(problem.sources))
    holding, last = allocate(problem, lifetimes=lifetimes), problem.segments - 1
    until = holding.until
    held = held_by(problem, until)
    assert (held == count_held(problem, holding)).all()
    assert (held <= problem.capacity).all()
    assert ((until >= np.arange(last)) & (until <= last)).all()
    assert lifetimes or ((until == np.arange(last)) | (until == last)).all()
    assert (until[:, : problem.forced] == last).all()
    least = error_of(problem, until)
    assert np.isfinite(least)
    assert sum_error(problem, holding) == pytest.approx(least)
    for head, source in product(range(problem.heads), range(last)):
        for end in range(until[head, source] + 1, problem.segments):
            longer = until.copy()
            longer[head, source] = end
            if (lifetimes or end == last) and (held_by(problem, longer) <= problem.capacity).all():
                assert error_of(problem, longer) > least


@given(problems())
@settings(max_examples=15, deadline=None)
def test_room_that_can_never_be_full_is_free(problem: Problem) -> None:
    prices = find_prices(problem)
    never = held_by(problem, problem.hold_everything().until) <= problem.capacity
    assert (prices[never] == 0).all()
    assert (prices[~never] > 0).all()


def test_lifetimes_are_close_to_a_bound_that_none_can_beat() -> None:
    problem = random_problem([1, 2, 3, 4, 4], 2, 20, seed=0, room=120)
    prices, every = find_prices(problem), list(chains(problem))
    used = [np.array([occupied(problem, chain, layer) for chain in every]) for layer in (0, 1)]
    # At any prices: the least that every head can pay, less what the capacity costs.
    bound = -float(prices @ problem.capacity)
    for head, layer in enumerate(problem.layer.tolist()):
        errors = [error(problem, chain, head) for chain in every]
        bound += float((np.array(errors) + used[layer] @ prices).min())
    reached = sum_error(problem, allocate(problem))
    assert bound <= reached <= 1.05 * bound


def test_what_one_change_cannot_use_an_exchange_does() -> None:
    # Two heads, whose block of 3 saves 4 and of 4 saves 5, and room for 4: the 3 alone leaves a token that nothing
    # fits into, until it goes and the 4 comes.
    sources: tuple[Chain, ...] = ((), (0,), (0, 1))
    errors = (np.zeros((1, 2)), np.zeros((2, 2)), np.array([[9.0, 9], [5, 5], [4, 4], [0, 0]]))
    problem = Problem(errors, sources, np.array([[3], [4]]), be_noiseless(3, 2), 1, np.full(6, 4))
    three = Holding(np.array([[2, 1], [0, 1]]), np.zeros((2, 2), int))
    assert (lengthen(problem, three).until == three.until).all()
    exchanged = exchange(problem, three, np.full(6, 0.1))
    assert (sum_error(problem, three), sum_error(problem, exchanged)) == (14, 13)
    assert held_by(problem, exchanged.until).max() == 4


@given(problems())
@settings(max_examples=30, deadline=None)
def test_exchanges_lower_the_error_and_fit(problem: Problem) -> None:
    prices = find_prices(problem)
    wanted = choose(problem, prices)
    wanted.until[:, : problem.forced] = problem.segments - 1
    before = lengthen(problem, shorten(problem, wanted))
    after = exchange(problem, before, prices)
    assert error_of(problem, after.until) <= error_of(problem, before.until)
    assert (held_by(problem, after.until) <= problem.capacity).all()
    assert (exchange(problem, before, prices).until == after.until).all()


def test_what_is_forced_must_fit() -> None:
    problem = random_problem([2, 3, 4], 1, 2, seed=0, room=-3, forced=2)
    with pytest.raises(ValueError, match="the forced sources alone exceed the capacity"):
        allocate(problem)
