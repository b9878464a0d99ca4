"""Means over crossed runs: equal to slow loops, and as often right as they say where the variances are known."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator
from scipy import stats

from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.protocol.crossed import cross_interval, cross_runs, sum_clusters
from kvbench.eval.protocol.intervals import Interval, Replicates, change_interval
from kvbench.eval.protocol.scores import MetricSpec, Score
from tests.support.image_sets import SCORED, run_folder

PSNR = {"psnr": MetricSpec("higher", "dB", digits=2)}
RUNS = 5


def draw(
    sd_prompts: float, sd_runs: float, sd_rest: float, count: int, prompts: int = 40, runs: int = RUNS
) -> np.ndarray:
    """Tables [count, prompts, runs] of mean 0 with known standard deviations."""
    rng = np.random.default_rng(3)
    shapes = ((count, prompts, 1), (count, 1, runs), (count, prompts, runs))
    parts = zip((sd_prompts, sd_runs, sd_rest), shapes, strict=True)
    return sum(sd * rng.normal(size=shape) for sd, shape in parts)


def test_interval_equals_variance_components_of_pairs_of_cells() -> None:
    [table] = draw(3.0, 3.0, 0.5, 1, prompts=7)
    rows, runs = table.shape
    corners = [
        (table[a, i] - table[b, i] - table[a, j] + table[b, j]) ** 2 / 4
        for a, b in combinations(range(rows), 2)
        for i, j in combinations(range(runs), 2)
    ]
    rest = np.mean(corners)
    of_prompts = np.mean([(a.mean() - b.mean()) ** 2 / 2 for a, b in combinations(table, 2)]) - rest / runs
    of_runs = np.mean([(a.mean() - b.mean()) ** 2 / 2 for a, b in combinations(table.T, 2)]) - rest / rows
    assert min(of_prompts, of_runs) > 0
    variance = of_prompts / rows + of_runs / runs + rest / (rows * runs)
    squares = {
        rows - 1: rest + runs * of_prompts,
        runs - 1: rest + rows * of_runs,
        (rows - 1) * (runs - 1): rest,
    }
    free = (variance * rows * runs) ** 2 / sum(square**2 / own for own, square in squares.items())
    interval, between = cross_interval(table)
    assert interval.se == pytest.approx(variance**0.5)
    assert between == pytest.approx(of_runs**0.5)
    reach = stats.t.ppf(0.975, free) * variance**0.5
    assert (interval.low, interval.high) == pytest.approx((table.mean() - reach, table.mean() + reach))
    assert interval.method == f"two-way, t {free:.1f}"


def hold(tables: np.ndarray) -> tuple[float, list[Interval], list[float]]:
    """How often the intervals of tables hold the truth, which is 0, the intervals, and the spreads of runs."""
    intervals, between = zip(*map(cross_interval, tables), strict=True)
    return float(np.mean([one.low < 0 < one.high for one in intervals])), list(intervals), list(between)


@pytest.mark.parametrize("sds", [(3.0, 1.0, 1.0), (0.2, 0.5, 0.5)])
def test_interval_holds_the_mean_of_other_prompts_and_other_runs(sds: tuple[float, float, float]) -> None:
    tables = draw(*sds, 1500)
    held, intervals, between = hold(tables)
    assert held == pytest.approx(0.95, abs=0.02)  # 3.5 standard errors
    spread = tables.mean((1, 2)).std()
    assert np.mean([interval.se**2 for interval in intervals]) == pytest.approx(spread**2, rel=0.1)
    assert np.mean(np.square(between)) == pytest.approx(sds[1] ** 2, rel=0.25)


@pytest.mark.parametrize("sds", [(1.0, 0.0, 1.0), (3.0, 0.3, 1.0)])
def test_two_runs_hold_and_are_not_several_times_too_wide(sds: tuple[float, float, float]) -> None:
    held, intervals, _ = hold(draw(*sds, 1500, runs=2))
    assert 0.93 < held < 0.985
    known = 2 * 1.96 * (sds[0] ** 2 / 40 + sds[1] ** 2 / 2 + sds[2] ** 2 / 80) ** 0.5
    assert np.median([interval.high - interval.low for interval in intervals]) < 1.2 * known


@pytest.mark.parametrize("sds", [(2.0, 1.0, 1.0), (0.3, 0.3, 1.0)])
def test_few_runs_whose_choices_matter_hold_less_often_than_they_say(sds: tuple[float, float, float]) -> None:
    """Values of two runs often agree by chance; docs/metrics.md has the shares."""
    two, three = (hold(draw(*sds, 1500, prompts=64, runs=runs))[0] for runs in (2, 3))
    assert two == pytest.approx(0.88, abs=0.02)
    assert 0.90 < three < 0.98


def test_equal_runs_have_the_error_of_clusters_and_no_spread(rng: Generator) -> None:
    values = rng.normal(size=30)
    clusters = [i // 3 if i < 21 else i for i in range(30)]
    data = np.repeat(values[:, None], RUNS, 1)
    table = sum_clusters(data, clusters)
    assert table.mean(0) == pytest.approx(data.mean(0))
    interval, between = cross_interval(table)
    sums = [
        sum(values[i] - values.mean() for i in range(30) if clusters[i] == own)
        for own in dict.fromkeys(clusters)
    ]
    count = len(sums)
    assert interval.se == pytest.approx((np.square(sums).sum() * count / (count - 1)) ** 0.5 / 30)
    assert between == pytest.approx(0, abs=1e-6)


def test_means_of_groups_weigh_groups_alike(rng: Generator) -> None:
    data = rng.normal(size=(10, 2)) + np.array([[5.0]] * 2 + [[0.0]] * 8)
    table = sum_clusters(data, range(10), ["few"] * 2 + ["many"] * 8)
    assert table.mean(0) == pytest.approx((data[:2].mean(0) + data[2:].mean(0)) / 2)
    assert cross_interval(table)[0].se < cross_interval(sum_clusters(data, range(10)))[0].se


def make_runs(root: Path, data: np.ndarray) -> list[Path]:
    """Folders with the values [SCORED, runs] of `psnr`, and of their mean as a metric of the whole set."""
    metrics, folders = {**PSNR, "whole": PSNR["psnr"]}, []
    for number, values in enumerate(data.T):
        means = values.reshape(-1, 2).mean(1)
        left = (means.sum() - means) / (len(means) - 1)
        parts = Replicates.from_groups(left, [f"prompt {i}" for i in range(len(means))])
        scores = {
            "psnr": Score(values.mean(), SCORED),
            "whole": Score(values.mean(), SCORED, replicates=parts),
        }
        folders.append(run_folder(root / str(number), {"psnr": values.tolist()}, metrics, scores))
    return folders


def test_a_metric_of_samples_and_its_replicates_have_one_interval(tmp_path: Path) -> None:
    [data] = draw(3.0, 1.0, 1.0, 1, prompts=SCORED)
    found = cross_runs(make_runs(tmp_path, 30 + data))
    table = (30 + data).reshape(-1, 2, RUNS).mean(1)
    interval, between = cross_interval(table)
    for one in found.values():
        assert one.mean.value == pytest.approx(table.mean())
        assert one.mean.interval == pytest.approx((interval.low, interval.high))
        assert one.between == pytest.approx(between)
        assert (one.mean.n, one.mean.digits) == (SCORED, 2)


def test_a_difference_is_paired(tmp_path: Path) -> None:
    [data] = draw(30.0, 0.3, 0.1, 1, prompts=SCORED)
    *folders, other = make_runs(tmp_path, data)
    for one in cross_runs(folders, other).values():
        paired = (data[:, :-1] - data[:, -1:]).reshape(-1, 2, RUNS - 1).mean(1)
        assert one.mean.value == pytest.approx(paired.mean())
        assert one.mean.se == pytest.approx(cross_interval(paired)[0].se)
        assert one.mean.se < 0.5 * cross_runs(folders)["psnr"].mean.se


def test_samples_without_a_number_and_metrics_of_some_runs_are_left_out(
    rng: Generator, tmp_path: Path
) -> None:
    values, score = rng.normal(size=SCORED).tolist(), {"psnr": Score(1.0, SCORED)}
    folders = [
        run_folder(tmp_path / name, {"psnr": [first, *values[1:]]}, PSNR, score)
        for name, first in (("a", float("inf")), ("b", values[0]))
    ]
    mean = cross_runs(folders)["psnr"].mean
    assert (mean.n, mean.value) == (SCORED - 1, pytest.approx(np.mean(values[1:])))
    assert cross_runs([*folders, run_folder(tmp_path / "c", {}, PSNR)]) == {}
    records = folders[1] / "samples.jsonl"
    records.write_text(records.read_text().replace("prompt 7", "prompt 8"))
    with pytest.raises(SampleSetError, match="sample 14 has prompt "):
        cross_runs(folders)


def test_answers_that_all_agree_have_an_interval_of_positive_width(tmp_path: Path) -> None:
    def make(kind: str, ci: str, value: float) -> list[Path]:
        scores = {"psnr": Score(1.0, SCORED, ci=ci)}
        folders = [tmp_path / kind / name for name in "abc"]
        return [run_folder(one, {"psnr": [value] * SCORED}, PSNR, scores) for one in folders]

    folders = make("answers", "wilson", 1.0)
    one = cross_runs(folders)["psnr"]
    assert (one.mean.value, one.between, one.mean.ci) == (1, 0, "wilson")
    quantile = stats.t.ppf(0.975, 29)  # of 30 prompts
    assert one.mean.interval == pytest.approx((30 / (30 + quantile**2), 1))
    own = change_interval([0.0] * 2 * SCORED, [i // 4 for i in range(2 * SCORED)])
    changes = make("changes", "agresti-min", 0.0)
    for change in (cross_runs(folders[:2], folders[2]), cross_runs(changes[:2])):
        assert change["psnr"].mean.interval == pytest.approx((own.low, own.high))
    same = make("images", "bootstrap", 0.0)
    for images in (cross_runs(same[:2]), cross_runs(same[:2], same[2])):
        assert images["psnr"].mean.interval == (0, 0)


def test_a_part_over_runs_has_at_least_its_own_interval_and_ends_at_its_range(tmp_path: Path) -> None:
    """Seeds that agree do not tell how other prompts would do; 100 is the most that the score can be."""

    def make(values: list[float], reach: float) -> list[Path]:
        metrics = {"geneval2[x]/count": MetricSpec("higher", detail=True)}
        return [
            run_folder(
                tmp_path / f"{one} {reach}",
                {},
                metrics,
                {"geneval2[x]/count": Score(one, 60, ci95=(one - reach, one + reach), ci="bootstrap")},
            )
            for one in values
        ]

    own = cross_runs(make([50.0, 50.1, 50.2], 3.0))["geneval2[x]/count"].mean
    assert (own.interval, own.ci) == (pytest.approx((47.1, 53.1)), "bootstrap")
    values = [80.0, 90.0, 97.0]
    reach = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / 3**0.5
    wide = cross_runs(make(values, 1.0))["geneval2[x]/count"].mean
    assert (wide.interval, wide.ci) == (pytest.approx((89 - reach, 100)), "over runs, t 2")
