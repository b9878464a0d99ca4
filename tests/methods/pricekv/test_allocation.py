"""Lifetimes: exact at given prices, never above the capacity, and no room is left that could be used."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.methods.pricekv.allocate import allocate
from kvbench.methods.pricekv.prices import choose_lifetimes, find_prices
from kvbench.methods.pricekv.problem import Ints, Problem, count_held, find_sets, sum_error

Chain = tuple[int, ...]
"""Set of sources that a head holds at each consumer."""


def chains(blocks: int, held: int = 0, consumer: int = 1) -> Iterator[Chain]:
    """All chains from a consumer on: what is held next is of what is held, and the newest block."""
    if consumer == blocks:
        yield ()
        return
    may_hold = held | 1 << (consumer - 1)
    for subset in range(1 << consumer):
        if subset & ~may_hold == 0:
            for rest in chains(blocks, subset, consumer + 1):
                yield (subset, *rest)


def tokens(problem: Problem, subset: int) -> int:
    return sum(length for i, length in enumerate(problem.lengths) if subset >> i & 1)


def occupied(problem: Problem, chain: Chain, layer: int) -> list[int]:
    """Tokens that a head of a layer has in the cache at each instant, walking through time."""
    sets = (0, *chain)
    return [
        tokens(problem, sets[min(k + (ran > layer), problem.blocks - 1)])
        for k in range(problem.blocks)
        for ran in range(problem.layers + 1)
    ]


def chains_of(until: Ints) -> list[Chain]:
    return [tuple(sets) for sets in find_sets(until)[1:].T.tolist()]


def held_by(problem: Problem, until: Ints) -> Ints:
    of_heads = [occupied(problem, chain, int(problem.layer[h])) for h, chain in enumerate(chains_of(until))]
    return np.array(of_heads).sum(0)


@st.composite
def problems(draw: st.DrawFn, most: int = 5) -> Problem:
    blocks, layers = draw(st.integers(2, most)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 6), min_size=blocks, max_size=blocks))
    forced = draw(st.integers(0, blocks - 1))
    return random_problem(
        lengths,
        layers,
        draw(st.integers(1, 2)),
        draw(st.integers(0, 10**6)),
        draw(st.integers(0, 20)),
        forced,
    )


def random_problem(
    lengths: list[int], layers: int, per_layer: int, seed: int, room: int, forced: int = 0
) -> Problem:
    generator, blocks, heads = np.random.default_rng(seed), len(lengths), layers * per_layer
    errors = [generator.random((1 << k, heads)) for k in range(blocks)]
    for k, of_sets in enumerate(errors):
        must = (1 << min(k, forced)) - 1
        of_sets[-1] = 0
        of_sets[np.arange(1 << k) & must != must] = np.inf
    capacity = room + heads * sum(lengths[:forced]) + generator.integers(0, 3, blocks * (layers + 1))
    return Problem(tuple(errors), tuple(lengths), layers, capacity, forced)


@given(problems(4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_at_given_prices_every_head_has_the_best_of_all_chains(problem: Problem, seed: int) -> None:
    prices = np.random.default_rng(seed).random(len(problem.capacity)) * 0.02

    def cost(chain: Chain, head: int) -> float:
        error = sum(problem.errors[k][subset, head] for k, subset in enumerate(chain, start=1))
        return float(error + prices @ np.array(occupied(problem, chain, int(problem.layer[head]))))

    def is_constant(chain: Chain) -> bool:
        return all(subset == chain[-1] & (1 << k) - 1 for k, subset in enumerate(chain, start=1))

    every = list(chains(problem.blocks))
    for lifetimes in (True, False):
        found = chains_of(choose_lifetimes(problem, prices, lifetimes=lifetimes))
        for head, chain in enumerate(found):
            assert chain in every
            best = min(cost(other, head) for other in every if lifetimes or is_constant(other))
            assert cost(chain, head) == pytest.approx(best)


@given(problems(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_lifetimes_fit_and_no_block_is_left_out_that_fits_and_does_no_harm(
    problem: Problem, lifetimes: bool
) -> None:
    until = allocate(problem, lifetimes=lifetimes)
    held = held_by(problem, until)
    assert (held == count_held(problem, until)).all()
    assert (held <= problem.capacity).all()
    for before, after, k in zip(find_sets(until), find_sets(until)[1:], range(problem.blocks), strict=False):
        assert ((after & ~(before | 1 << k)) == 0).all()
    assert (until[:, : problem.forced] == problem.blocks - 1).all()
    error = sum_error(problem, until)
    assert np.isfinite(error)
    for head, source in product(range(problem.heads), range(problem.blocks - 1)):
        ends = range(until[head, source] + 1, problem.blocks) if lifetimes else [problem.blocks - 1]
        for end in ends:
            longer = until.copy()
            longer[head, source] = end
            if end > until[head, source] and (held_by(problem, longer) <= problem.capacity).all():
                assert sum_error(problem, longer) > error - 1e-12


@given(problems())
@settings(max_examples=15, deadline=None)
def test_room_that_can_never_be_full_is_free(problem: Problem) -> None:
    prices = find_prices(problem)
    never = held_by(problem, problem.hold_everything()) <= problem.capacity
    assert (prices[never] == 0).all()
    assert (prices[~never] > 0).all()


def test_lifetimes_are_close_to_a_bound_that_none_can_beat() -> None:
    problem = random_problem([1, 2, 3, 4, 4], 2, 20, seed=0, room=120)
    prices, every = find_prices(problem), list(chains(problem.blocks))
    used = [np.array([occupied(problem, chain, layer) for chain in every]) for layer in (0, 1)]
    # At any prices: the least that every head can pay, less what the capacity costs.
    bound = -float(prices @ problem.capacity)
    for head, layer in enumerate(problem.layer.tolist()):
        errors = [sum(problem.errors[k][s, head] for k, s in enumerate(chain, 1)) for chain in every]
        bound += float((np.array(errors) + used[layer] @ prices).min())
    reached = sum_error(problem, allocate(problem))
    assert bound <= reached <= 1.05 * bound


def test_what_is_forced_must_fit() -> None:
    problem = random_problem([2, 3, 4], 1, 2, seed=0, room=-3, forced=2)
    with pytest.raises(ValueError, match="the forced sources alone exceed the capacity"):
        allocate(problem)
