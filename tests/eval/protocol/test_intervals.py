"""Intervals: the stored resamples, clusters and strata, the jackknife, how often they hold the truth."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from kvbench.eval.distribution.fid import Fid
from kvbench.eval.distribution.frechet import frechet_distance
from kvbench.eval.protocol.intervals import (
    SEED,
    STATISTIC_RESAMPLES,
    Interval,
    assign_groups,
    bootstrap,
    change_interval,
    combine_strata,
    find_quantile,
    jackknife,
    leave_out,
    percentile_interval,
    resample_means,
    resample_statistic,
    share_interval,
    wilson_interval,
)
from kvbench.eval.protocol.scores import share_score
from tests.support.image_sets import ARRAYS, EXPECTED, PAIRS
from tests.support.marks import slow_except


def test_percentile_interval_equals_the_stored_resamples() -> None:
    values = np.array([pair["lpips_tiny"] for pair in PAIRS.values()])
    means = values[ARRAYS["bootstrap_index"]].mean(1)
    interval = percentile_interval(means, "stored")
    assert (interval.low, interval.high) == pytest.approx(EXPECTED["bootstrap"]["percentile95"], abs=1e-12)
    assert interval.se == pytest.approx(EXPECTED["bootstrap"]["se"], rel=0.01)


def test_bootstrap_is_seeded_and_has_the_right_width() -> None:
    values = np.random.default_rng(1).normal(5, 2, 400)
    interval = bootstrap(values)
    assert interval == bootstrap(values)
    assert interval.se == pytest.approx(2 / 400**0.5, rel=0.1)
    assert interval.low < values.mean() < interval.high
    assert bootstrap([1.0]) is None


@pytest.mark.parametrize("count", [3, 10])
def test_few_clusters_have_the_standard_error_of_a_sample_and_students_quantile(count: int) -> None:
    values = np.random.default_rng(3).normal(size=count)
    interval = bootstrap(values.tolist())
    assert interval.se == pytest.approx(values.std(ddof=1) / count**0.5, rel=0.04)
    plain = percentile_interval(resample_means(values.tolist()), "plain")
    stretched = (count / (count - 1)) ** 0.5 * stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975)
    assert interval.high - interval.low == pytest.approx(stretched * (plain.high - plain.low), rel=1e-5)


def test_clusters_widen_the_interval_as_theory_says() -> None:
    rng = np.random.default_rng(2)
    prompts = np.repeat(np.arange(200), 4)
    values = rng.normal(size=200)[prompts]
    clustered = resample_means(values, list(prompts)).std()
    assert clustered == pytest.approx(2 * resample_means(values).std(), rel=0.1)


def test_jackknife_leaves_whole_prompts_out() -> None:
    seen: list[set[int]] = []
    prompts = [index // 3 for index in range(30)]
    leave_out(lambda kept: float(len(seen.append({prompts[i] for i in kept}) or kept)), prompts)
    assert [len(groups) for groups in seen] == [9] * 10


def test_infinite_estimates_end_an_interval() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        some = percentile_interval(np.array([np.inf] * 3 + list(range(97)), np.float64), "")
        infinite = percentile_interval(np.array([np.inf] * 99 + [5.0]), "")
    assert (some.low, some.high) == (2, np.inf)
    assert (infinite.low, infinite.high) == (np.inf, np.inf)
    assert np.isnan(some.se)


def test_the_distances_to_the_ends_of_strata_add_as_squares() -> None:
    rng = np.random.default_rng(3)
    strata = [(rng.exponential(size=size), list(range(size))) for size in (50, 200, 200)]
    means, parts = [float(values.mean()) for values, _ in strata], [bootstrap(*stratum) for stratum in strata]
    whole, centre = combine_strata(means, parts), sum(means) / 3
    pairs = list(zip(means, parts, strict=True))
    assert whole.se == pytest.approx(math.hypot(*(part.se for part in parts)) / 3)
    assert centre - whole.low == pytest.approx(math.hypot(*(mean - part.low for mean, part in pairs)) / 3)
    assert whole.high - centre == pytest.approx(math.hypot(*(part.high - mean for mean, part in pairs)) / 3)
    assert combine_strata([1.0, 2.0], [parts[0], None]) is None


def test_a_quantile_is_resampled_by_cluster() -> None:
    clusters, values = [number // 2 for number in range(24)], np.random.default_rng(1).gamma(1.0, size=24)

    def find(positions: np.ndarray) -> float:
        return float(np.quantile(values[positions], 0.9))

    value = find(np.arange(24))
    interval = resample_statistic(find, value, clusters)
    rows = np.random.default_rng(SEED).integers(12, size=(STATISTIC_RESAMPLES, 12))
    slow = [
        np.quantile([values[2 * cluster + one] for cluster in row for one in (0, 1)], 0.9) for row in rows
    ]
    factor = np.sqrt(12 / 11) * find_quantile(12) / 1.959964
    ends = value + factor * (np.percentile(slow, (2.5, 97.5)) - value)
    assert (interval.low, interval.high) == pytest.approx(tuple(ends))
    assert interval.replicates.values == pytest.approx(slow)
    assert resample_statistic(find, value, ["one"] * 24) is None


# Class-conditional sets


def labels(classes: int, each: int) -> list[str]:
    return [str(index % classes) for index in range(classes * each)]


@pytest.mark.parametrize(("classes", "each", "groups"), [(100, 50, 10), (10, 40, 20), (8, 7, 7)])
def test_every_group_has_as_many_samples_of_every_class(classes: int, each: int, groups: int) -> None:
    clusters = labels(classes, each)
    counts = np.zeros((classes, groups))
    np.add.at(counts, ([int(one) for one in clusters], assign_groups(clusters)), 1)
    assert (counts == each / groups).all()


def test_classes_that_no_number_divides_are_spread_as_evenly_as_can_be() -> None:
    clusters = [str(number) for number in range(30) for _ in range(number + 1)]
    dealt = assign_groups(clusters)
    assert np.ptp(np.bincount(dealt)) <= 1
    assert len(np.bincount(dealt)) == 20
    for number in range(30):
        mine = np.bincount(dealt[[cluster == str(number) for cluster in clusters]], minlength=20)
        assert np.ptp(mine) <= 1
    assert assign_groups(["7", "7", "8"]).tolist().count(0) == 1  # fewer samples than groups


def test_the_jackknife_of_classes_knows_that_classes_are_fixed() -> None:
    rng = np.random.default_rng(7)
    clusters = labels(100, 50)
    values = rng.normal(0, 5, 100)[[int(one) for one in clusters]] + rng.normal(size=5000)
    interval = jackknife(lambda kept: float(values[kept].mean()), float(values.mean()), clusters)
    assert interval.se == pytest.approx(5000**-0.5, rel=0.5)  # dealing classes whole gives 0.5
    assert interval.method == "jackknife 10 groups within classes seed 0"
    sentences = [f"class {one}" for one in clusters]
    whole = jackknife(lambda kept: float(values[kept].mean()), float(values.mean()), sentences)
    assert whole.se == pytest.approx(0.5, rel=0.5)


# Bias


def test_the_bias_of_a_variance_is_found() -> None:
    values = np.random.default_rng(8).normal(size=20)  # as many as groups: then it is exact
    interval = jackknife(lambda kept: float(values[kept].var()), float(values.var()), range(20))
    assert interval.bias == pytest.approx(-values.var(ddof=1) / 20)


def test_the_jackknife_of_a_distance_leaves_samples_out_on_both_sides() -> None:
    rng = np.random.default_rng(10)
    a = rng.normal(size=(60, 4))
    b = a + rng.normal(0, 0.1, size=a.shape)
    prompts = [f"prompt {i // 2}" for i in range(60)]
    dealt = assign_groups(prompts)
    without = np.array([frechet_distance(a[dealt != g], b[dealt != g]) for g in range(20)])
    [score] = Fid().compare(a, b, prompts)
    assert (score.value, score.n) == (frechet_distance(a, b), 60)
    assert sum(score.ci95) / 2 == pytest.approx(score.value)
    assert score.se == pytest.approx((19 / 20 * np.square(without - without.mean()).sum()) ** 0.5)
    assert score.bias == pytest.approx(19 * (without.mean() - frechet_distance(a, b)))


# Shares


@pytest.mark.parametrize(("right", "count"), [(20, 20), (0, 20), (79, 80)])
def test_a_share_has_the_interval_of_wilson(right: int, count: int) -> None:
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    found = share_interval([1.0] * right + [0.0] * (count - right))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-7)
    score = share_score([100.0] * right + [0.0] * (count - right), whole=100)
    assert score.ci95 == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-5)
    assert score.value == pytest.approx(100 * right / count)


def test_equal_answers_to_one_prompt_count_once() -> None:
    prompts = [f"prompt {i // 4}" for i in range(240)]
    right = [float(i // 4 % 3 > 0) for i in range(240)]
    once = wilson_interval(2 / 3, 60)
    clustered, whole = share_interval(right, prompts), share_interval([1.0] * 240, prompts)
    assert (clustered.low, clustered.high) == pytest.approx((once.low, once.high))
    assert (whole.low, whole.high) == (pytest.approx(wilson_interval(1, 60).low), 1)
    assert share_interval([1.0] * 4, ["one"] * 4) is None


# Coverage: how often an interval holds the truth


def coverage(
    draw: Callable[[np.random.Generator], Interval | None], truth: Callable[[], float], rounds: int = 1000
) -> float:
    rng = np.random.default_rng(11)
    intervals = (draw(rng) for _ in range(rounds))
    return float(np.mean([found.low <= truth() <= found.high for found in intervals]))


@pytest.mark.parametrize(("shape", "count"), [("normal", 20), ("laplace", 60)])
def test_means_are_covered(shape: str, count: int) -> None:
    assert coverage(lambda rng: bootstrap(getattr(rng, shape)(size=count)), lambda: 0) >= 0.93


@pytest.mark.parametrize("count", slow_except((60).__eq__, [60, 20, 300]))
@pytest.mark.parametrize(("won", "lost"), [(0.01, 0.01), (0.2, 0.1)])
@pytest.mark.parametrize("same", [0.0, 1.0])
def test_differences_of_shares_are_covered(won: float, lost: float, same: float, count: int) -> None:
    def draw(rng: np.random.Generator) -> Interval | None:
        answers = rng.choice([1.0, -1.0, 0.0], (count, 4), p=(won, lost, 1 - won - lost))
        answers = np.where(rng.random((count, 1)) < same, answers[:, :1], answers)
        return change_interval(answers.ravel(), [f"prompt {i // 4}" for i in range(4 * count)])

    assert coverage(draw, lambda: won - lost) >= 0.93


@pytest.mark.parametrize(("won", "lost", "count"), [(7, 2, 100), (40, 5, 60), (0, 12, 12)])
def test_a_difference_of_single_answers_is_that_of_agresti_and_min(won: int, lost: int, count: int) -> None:
    found = change_interval([1.0] * won + [-1.0] * lost + [0.0] * (count - won - lost))
    more, less, total = won + 0.5, lost + 0.5, count + 2
    centre = (more - less) / total
    reach = find_quantile(count) * (more + less - (more - less) ** 2 / total) ** 0.5 / total
    assert (found.low, found.high) == pytest.approx((max(centre - reach, -1), centre + reach))


@pytest.mark.parametrize(("count", "same"), [(20, 1.0), (60, 0.5)])
def test_shares_of_clustered_samples_are_covered(count: int, same: float) -> None:
    prompts = [f"prompt {i // 4}" for i in range(4 * count)]

    def draw(rng: np.random.Generator) -> Interval | None:
        images, prompt = rng.random((count, 4)) < 0.7, rng.random((count, 1)) < 0.7
        return share_interval(
            np.where(rng.random((count, 1)) < same, prompt, images).ravel().astype(float), prompts
        )

    assert coverage(draw, lambda: 0.7) >= 0.93


@pytest.mark.parametrize(("classes", "each"), [(0, 20), (0, 200), (10, 20)])
def test_statistics_of_whole_sets_are_covered(classes: int, each: int) -> None:
    clusters = labels(classes, each) if classes else [f"prompt {i}" for i in range(each)]
    levels = np.array([3 * int(one) if classes else 0 for one in clusters])

    def draw(rng: np.random.Generator) -> Interval | None:
        values = rng.normal(levels, 1)
        return jackknife(lambda kept: float(values[kept].mean()), float(values.mean()), clusters)

    assert coverage(draw, lambda: levels.mean(), 600) >= 0.93


def test_few_prompts_have_a_share_s_interval_of_student() -> None:
    """Four prompts of two answers: Wilson's interval of the effective number, with three degrees of freedom."""
    right, prompts = [1.0, 1, 0, 1, 0, 0, 1, 0], [n // 2 for n in range(8)]
    share, sums = 0.5, (2, 1, 0, 1)
    effective = share * (1 - share) / (sum((one - 2 * share) ** 2 for one in sums) / 64)
    t = stats.t.ppf(0.975, 3)
    reach = (
        t * math.sqrt(share * (1 - share) / effective + t**2 / (4 * effective**2)) / (1 + t**2 / effective)
    )
    found = share_interval(right, prompts)
    assert (found.low, found.high) == pytest.approx((share - reach, share + reach))
