"""Allocations with predicted blocks against all allocations of a small problem, and what holds of each."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.engine.coding.formats import list_predicted
from kvbench.engine.packed.prediction import find_predictable
from kvbench.engine.schedule import build_schedule
from kvbench.methods.pricekv.allocate import allocate
from kvbench.methods.pricekv.method import PriceKV
from kvbench.methods.pricekv.predictions import Predictions, allocate_predicted, choose_predicted
from kvbench.methods.pricekv.problem import Allocation, Problem, list_sources, measure_usage, sum_error
from tests.methods.pricekv.test_pricekv import artifact_of
from tests.support.engine import D

SPEC = ModelSpec("scales", 1, 2, D, next_scale([(1, 1), (1, 2), (2, 2), (2, 3)]))
LARGE = replace(
    SPEC, layers=3, heads=3, segments=next_scale([(s, s) for s in (1, 2, 3, 4, 5, 6)]), branches=2
)


def make_problem(seed: int) -> tuple[Problem, Predictions]:
    """Random errors that fall with each source, noise that grows with each target, and less noise of predictions."""
    random, sources = np.random.default_rng(seed), list_sources(SPEC, 8)
    errors = [np.zeros((1, 2))]
    for of_target in sources[1:]:
        gains = random.uniform(0.5, 2, (len(of_target), 2))
        missing = 1 - (np.arange(1 << len(of_target))[:, None] >> np.arange(len(of_target)) & 1)
        errors.append((missing @ gains) ** 1.5)
    count, sizes = len(sources), np.array(SPEC.lengths[:-1])[:, None] * [[4, 2, 1]]
    targets = np.arange(count) > np.arange(count - 1)[:, None]
    noise = random.uniform(0, 0.6, (count - 1, 3, count, 2)) * targets[:, None, :, None]
    noise = (noise * np.array([0, 0.5, 1])[:, None, None]).cumsum(2)
    less = noise * random.uniform(0.1, 1.2, noise.shape[:2])[:, :, None, None]
    less[:, 0] = np.inf
    capacity = np.full(count * 2, 24)
    problem = Problem(tuple(errors), sources, sizes, noise, 1, capacity)
    return problem, Predictions(less, np.array([False, False, False]), np.array([16, 8, 4]))


def measure(problem: Problem, predictions: Predictions, allocation: Allocation) -> float:
    """The error, block by block, with the better noise where the scale before stays as long in as many bits."""
    error = sum_error(replace(problem, noise=np.zeros_like(problem.noise)), allocation)
    for head, source in product(range(problem.heads), range(problem.segments - 1)):
        end, precision = allocation.until[head, source], allocation.precision[head, source]
        noise = problem.noise[source, precision, end, head]
        coarse = source and allocation.precision[head, source - 1] > precision
        if source and not coarse and allocation.until[head, source - 1] >= end > source:
            noise = min(noise, predictions.noise[source, precision, end, head])
        error += noise
    return error


@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_near_the_least_of_all_allocations(seed: int) -> None:
    problem, predictions = make_problem(seed)
    last, least = problem.segments - 1, np.inf
    of_head = list(product(*[range(source, last + 1) for source in range(last)], *[range(3)] * last))
    lives = [(np.array(choice[:last]), np.array(choice[last:])) for choice in of_head]
    lives = [(until, f) for until, f in lives if (f[until <= np.arange(last)] == 0).all()]
    usage = {}
    for head, (number, (until, f)) in product(range(2), enumerate(lives)):
        both = Allocation(np.tile(np.arange(last), (2, 1)), np.zeros((2, last), np.int64))
        both.until[head], both.precision[head] = until, f
        empty = Allocation(np.tile(np.arange(last), (2, 1)), np.zeros((2, last), np.int64))
        rest = measure(problem, predictions, empty)
        usage[head, number] = measure(problem, predictions, both) - rest, measure_usage(problem, both)
    for first, second in product(range(len(lives)), repeat=2):
        if (usage[0, first][1] + usage[1, second][1] <= problem.capacity).all():
            least = min(least, usage[0, first][0] + usage[1, second][0])
    least += rest
    found, predicted = allocate_predicted(problem, predictions, allocate)
    assert (measure_usage(problem, found) <= problem.capacity).all()
    error = measure(problem, predictions, found)
    assert least - 1e-9 <= error <= 1.15 * least + 1e-9
    assert error <= measure(problem, predictions, allocate(problem)) + 1e-9
    for head, source in np.argwhere(predicted):
        assert found.until[head, source] <= found.until[head, source - 1]
        assert found.precision[head, source] >= found.precision[head, source - 1]


def test_a_block_is_predicted_from_branches_that_differ() -> None:
    problem, predictions = make_problem(0)
    less = np.where(np.isfinite(predictions.noise), problem.noise / 2, np.inf)
    predictions = Predictions(less, np.array([False, True, True]), np.array([16, 4, 4]))
    last = problem.segments - 1
    until, precision = np.full((2, last), last), np.array([[0, *[1] * (last - 1)], [1] * last])
    predicted, saved = choose_predicted(problem, predictions, Allocation(until, precision))
    assert (saved[:, 1:] > 0).all()
    assert predicted[0].tolist() == [False, *[True] * (last - 1)]
    assert not predicted[1].any()


@pytest.mark.parametrize("share", [False, True])
def test_a_schedule_holds_the_scale_before_each_predicted_block(share: bool) -> None:
    method = PriceKV(menu=[16, 4, 2, 1], share=share, predicted=True)
    artifact = artifact_of(method, LARGE)
    noise, count = artifact.tensors["noise"], len(method.offered)
    noise.mul_(1e-3)
    coded = [index for index, one in enumerate(method.offered) if one.bits < 16]
    noise[:, :, :, count:] = noise[:, :, :, coded] / 4
    method.prepare(LARGE, Budget.parse_bytes("0.06", LARGE, token_bytes=4 * D), artifact)
    wanted = list_predicted(LARGE, method)
    schedule = build_schedule(LARGE, method, find_free_slots=lambda _: 0)
    assert wanted.any()
    assert not (wanted & ~find_predictable(LARGE, schedule)).any()
    plain = replace(method, predicted=False)
    with pytest.raises(ValueError, match=r"bits must be of 16, 8, 4, 3, 2$"):
        plain.check(LARGE, method.budget)


def test_predictions_without_use_change_nothing() -> None:
    method, plain = (PriceKV(menu=[16, 4, 2], predicted=predicted) for predicted in (True, False))
    artifact = artifact_of(method, LARGE)
    artifact.tensors["noise"][:, :, :, 3:] = torch.inf
    budget = Budget.parse_bytes("0.1", LARGE, token_bytes=4 * D)
    method.prepare(LARGE, budget, artifact)
    of_plain = artifact_of(plain, LARGE)
    of_plain.tensors.update(
        error=artifact.tensors["error"], noise=artifact.tensors["noise"][:, :, :, :3].clone()
    )
    plain.prepare(LARGE, budget, of_plain)
    for layer, segment in product(range(LARGE.layers), LARGE.segments[:-1]):
        assert method.precisions(layer, segment) == plain.precisions(layer, segment)
    assert (method.solution.until == plain.solution.until).all()


def test_settings_that_cannot_predict_are_refused() -> None:
    budget = Budget.parse_bytes("0.1", LARGE, token_bytes=4 * D)
    rows = replace(LARGE, segments=next_token(3, [4, 4, 3]))
    for method, spec in ((PriceKV(predicted=True), LARGE), (PriceKV(menu=[16, 2], predicted=True), rows)):
        with pytest.raises(
            ValueError, match=r"method.predicted=true: needs method.menu and a next-scale model"
        ):
            method.check(spec, budget)


def test_predictions_name_a_calibration_of_their_own() -> None:
    plain, predicted = (repr(PriceKV(menu=[4], predicted=one).needs()) for one in (False, True))
    assert plain != predicted
