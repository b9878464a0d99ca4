"""Confidence sequences against slow references, and their coverage over all looks."""

import math

import numpy as np
import pytest

from kvbench.eval.protocol.sequences import bounded_sequence, normal_sequence


def test_normal_sequence_is_the_published_boundary():
    values = np.array([0.0, 1.0, 4.0, 3.0])
    rho2 = (2 * math.log(20) + math.log(2 * math.log(20) + 1)) / 64
    # arXiv:2103.06476, the asymptotic sequence, for four values with a standard deviation of sqrt(2.5)
    reach = math.sqrt(2.5) * math.sqrt(
        2 * (4 * rho2 + 1) / (16 * rho2) * math.log(math.sqrt(4 * rho2 + 1) / 0.05)
    )
    assert normal_sequence(values, 0.05) == pytest.approx((2 - reach, 2 + reach))


def test_bounded_sequence_is_a_loop_over_bets():
    values, error = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], 30), 0.01
    unit = [(value + 1) / 2 for value in values]
    mean, variance, bets, cost, seen, squares = 0.5, 0.25, [], 0.0, 0.0, 0.25
    for t, one in enumerate(unit, 1):
        bet = min(math.sqrt(2 * math.log(2 / error) / (variance * t * math.log(1 + t))), 0.75)
        bets.append(bet)
        cost += 4 * (one - mean) ** 2 * (-math.log(1 - bet) - bet) / 4
        seen += one
        mean = (0.5 + seen) / (t + 1)
        squares += (one - mean) ** 2
        variance = squares / (t + 1)
    centre = sum(bet * one for bet, one in zip(bets, unit, strict=True)) / sum(bets)
    reach = (math.log(2 / error) + cost) / sum(bets)
    expected = tuple(2 * min(max(end, 0), 1) - 1 for end in (centre - reach, centre + reach))
    assert bounded_sequence(values, error, -1.0, 1.0) == pytest.approx(expected)
    rows = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], (3, 40))
    for find in (lambda one: normal_sequence(one, 0.05), lambda one: bounded_sequence(one, 0.05, -1.0, 1.0)):
        assert np.array(find(rows)) == pytest.approx(np.array([find(row) for row in rows]).T)


def test_values_beyond_the_bounds_are_refused():
    with pytest.raises(ValueError, match=r"values lie in -2\.\.1, not in -1\.\.1"):
        bounded_sequence(np.array([1.0, -2.0]), 0.05, -1.0, 1.0)


@pytest.mark.parametrize("kind", ["normal", "bounded"])
def test_the_mean_is_outside_at_any_look_with_at_most_the_error(kind):
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        values = rng.normal(0, 1, 256) if kind == "normal" else rng.choice([-1.0, 0.0, 1.0], 256)
        ends = [
            normal_sequence(values[:n], 0.1) if kind == "normal" else bounded_sequence(values[:n], 0.1, -1, 1)
            for n in range(16, 257, 16)
        ]
        wrong += any(low > 0 or high < 0 for low, high in ends)
    assert wrong / 300 <= 0.1  # the bound at any stopping time; fixed intervals at 16 looks err in about 0.35


def test_both_narrow_around_a_mean_that_is_not_zero():
    values = np.random.default_rng(2).choice([0.0, 1.0], 4000, p=[0.2, 0.8])
    for low, high in (normal_sequence(values, 0.05), bounded_sequence(values, 0.05, -1.0, 1.0)):
        assert 0.7 < low < 0.8 < high < 0.9
