"""Races on drawn values: who leaves, how often the best is dropped; confidence sequences and their coverage."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta

from benchmarks.races import hold_tests
from kvbench.core.config import ConfigError
from kvbench.eval.protocol.sequences import bounded_sequence, normal_sequence
from kvbench.extras.race.result import Setting, describe_end, make_rows, rank
from kvbench.extras.race.rules import (
    Elimination,
    InterimResult,
    Race,
    Rules,
    advance,
    average,
    measure_lead,
    split_blocks,
)
from kvbench.extras.race.values import find_limits


def race_on(values, rules, block=16):
    """Return a race after looks at blocks of all values, as long as it goes on."""
    race, count = Race.start(list(values), rules), 0
    total = len(next(iter(values.values())))
    while race.state == "racing" and count < total:
        count = min(count + block, total)
        race = advance(race, {method: values[method][:count] for method in race.racing})
    return race


def draw(means, count=256, seed=0, shared=1.0):
    """Return values that share most of their variance, as methods on the same prompts do."""
    rng = np.random.default_rng(seed)
    prompts = rng.normal(0, shared, count)
    return {name: mean + prompts + rng.normal(0, 0.5, count) for name, mean in means.items()}


def test_a_method_leaves_when_another_is_ahead_and_the_best_wins():
    race = race_on(draw({"a": 0.0, "b": 3.0, "c": 2.6}), Rules())
    assert race.racing == ("b",)
    assert race.state == "won"
    assert [one.method for one in race.exits] == ["a", "c"]
    assert race.exits[0].after == 16
    assert race.exits[-1].better == "b"
    assert race.exits[-1].ahead[0] > 0
    assert race_on(draw({"a": 0.0, "b": 3.0}), Rules(higher=False)).racing == ("a",)


def test_equal_differences_decide_nothing():
    values = draw({"a": 1.0, "worse": -2.0})
    race = race_on({"a": values["a"], "twin": values["a"], "worse": values["worse"]}, Rules(margin=0.1))
    assert (race.state, set(race.racing)) == ("racing", {"a", "twin"})
    assert race.looks[-1].leads in ({"twin": None}, {"a": None})
    assert [one.method for one in race.exits] == ["worse"]


def test_a_margin_ends_a_race_of_methods_that_hardly_differ():
    values = draw({"a": 1.0, "b": 1.02}, count=512)
    assert race_on(values, Rules()).state == "racing"
    race = race_on(values, Rules(margin=0.5))
    assert race.state == "level"
    assert race.looks[-1].after < 512
    assert all(high <= 0.5 for _, high in race.looks[-1].leads.values())


def test_the_best_is_dropped_in_at_most_the_error_of_races():
    dropped, naive = 0, 0
    for seed in range(200):
        values = draw({"best": 0.0, **{f"m{number}": 0.0 for number in range(5)}}, count=256, seed=seed)
        dropped += "best" not in race_on(values, Rules(error=0.05)).racing
        naive += hold_tests(values, 16)[0]
    assert dropped <= 10
    assert naive > 20


@pytest.mark.parametrize("limits", [None, (0.0, 1.0)])
def test_a_look_compares_every_pair(limits):
    """Each look equals a loop over pairs of methods, one interval at a time."""
    means = {f"m{number}": 0.25 * number for number in range(7)}
    values = {name: np.round(one) for name, one in draw(means, count=200, seed=3).items()}
    if limits is not None:
        values = {name: (one > 0.8).astype(float) for name, one in values.items()}
    race, left = Race.start(list(values), Rules(limits=limits)), list(values)
    for count in range(20, 201, 20):
        seen = {method: values[method][:count] for method in left}
        race = advance(race, seen)
        order = sorted(left, key=lambda method: -seen[method].mean())
        out = {}
        for place, other in enumerate(order):
            for better in order[:place]:
                given = seen[better] - seen[other], 0.05 / 6
                low, high = normal_sequence(*given) if limits is None else bounded_sequence(*given, -1.0, 1.0)
                if low > 0 and other not in out:
                    out[other] = (better, (low, high))
        found = {one.method: one for one in race.exits if one.after == count}
        assert {method: one.better for method, one in found.items()} == {m: b for m, (b, _) in out.items()}
        assert all(found[method].ahead == pytest.approx(ends) for method, (_, ends) in out.items())
        left = [method for method in order if method not in out]
        assert race.racing == tuple(left)
        if len(left) == 1:
            break
    assert len(left) < 7


def test_a_leader_that_is_behind_by_its_interval_is_not_level():
    """Means of answers are not the centres of their intervals: b won the first 60 prompts, a the next 61."""
    values = {"a": np.repeat([0.0, 1.0], (60, 61)), "b": np.repeat([1.0, 0.0], (60, 61))}
    race = advance(Race.start(["a", "b"], Rules(limits=(0.0, 1.0))), values)
    [(low, high)] = race.looks[-1].leads.values()
    assert race.racing == ("a", "b")
    assert low < high < 0
    assert race.state == "racing"


def test_only_values_with_two_bounds_are_answers():
    zeros = [0.0] * 8
    assert find_limits("exact_answer", [0.0, 1.0]) == find_limits("string_match_part", zeros) == (0.0, 1.0)
    assert find_limits("exact_answer", [0.0, 0.5]) is None
    assert find_limits("kl", zeros) is None
    # One differing answer in the first block decides nothing, although its standard deviation is small.
    near = {"good": np.ones(16), "bad": np.r_[np.ones(15), 0.0]}
    assert race_on(near, Rules(limits=(0.0, 1.0))).state == "racing"


def test_a_lead_is_over_samples_that_both_drew():
    later = [("z", 90.0), ("w", 7.0)]
    found = {"leader": [("x", 2.0), ("y", 6.0), *later], "other": [("x", 1.0), ("y", 3.0)]}
    assert measure_lead(found, "leader", "other").tolist() == [1.0, 3.0]
    assert measure_lead(found, "leader", "other", 1).tolist() == [1.0]
    race = Race(
        Rules(), ("leader", "other"), ("leader",), exits=(Elimination("other", 2, "leader", (0.1, 4.0)),)
    )
    [first, second] = rank(race, found)
    assert (first["prompts"], second["prompts"], second["lead"]) == (4, 2, 2.0)
    [_, cells] = make_rows([first, second], 1)
    assert [*cells.values()][1:] == ["2", "2.0", "4.0", "2.0", "after 2, leader ahead by 0.1 to 4.0"]


def test_blocks_end_with_prompts_and_batches_and_neighbours_are_one_unit():
    prompts = [f"prompt {index // 4}" for index in range(96)]
    assert split_blocks(prompts, 8, 8) == [range(32), range(32, 64), range(64, 96)]
    assert split_blocks(prompts, 8, 64) == [range(64), range(64, 96)]
    assert split_blocks([str(index) for index in range(20)], 16, 1) == [range(16), range(16, 20)]
    with pytest.raises(ConfigError, match=r"choose.block=16: the first block has 4 prompts"):
        split_blocks(prompts[:16], 16, 8)
    drawn = [("x", 1.0), ("x", 3.0), ("y", 5.0), ("x", 4.0)]  # a prompt that comes again is another unit
    assert average({"a": drawn}, ["a"])["a"].tolist() == [2.0, 5.0, 4.0]


@pytest.mark.parametrize("others", [1, 19])
def test_the_share_of_failures_that_may_not_have_shown_is_told(others):
    """It is Clopper and Pearson's upper end for no failure in 16 prompts, at the error of a pair."""
    left = (Elimination("a", 16, "b", (0.1, 4.0)), Elimination("c", 32, "b", (0.1, 4.0)))
    entrants = tuple("abcdefghijklmnopqrst"[: others + 1])
    race = Race(Rules(), entrants, ("b",), (InterimResult(32, {}, {}),), left, "won")
    share = beta.ppf(1 - 0.05 / others, 1, 16)
    assert race.rarest_shown == pytest.approx(share)
    setting = Setting("", "", "psnr", 1, 1, {}, {}, {}, "")
    [line] = [line for line in describe_end(race, setting) if "choose.error" in line]
    assert f"The first left after 16 prompts. A method that fails badly in fewer than {share:.0%} of" in line
    for other in (replace(race, exits=()), replace(race, rules=Rules(limits=(0.0, 1.0)))):
        assert not any("choose.error" in line for line in describe_end(other, setting))


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
