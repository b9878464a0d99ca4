"""Runs that differ only in seeds become one row: the mean over seeds, with an interval over prompts and seeds."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy import stats

from kvbench.core.files import hash_values
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.scores import Metric, MetricSpec, Score
from kvbench.report.ablations import find_ablations, name_ablation
from kvbench.report.conditions import find_group
from kvbench.report.figures.plots import trace_curves
from kvbench.report.means import KEPT
from kvbench.report.runs_table import make_csv_rows, make_rows, show_runs
from kvbench.report.seeds import (
    Combined,
    MeanMetric,
    combine_seeds,
    compare_seeds,
    count_seeds,
    group_seeds,
    list_members,
    name_count,
)
from kvbench.report.tables import format_csv
from kvbench.runs.record.results import Results
from tests.support.image_sets import write_lines
from tests.support.results import made_up, printed

CONFIG = {"model": {"name": "m"}, "method": {"sinks": 1}, "prompts": {"count": 8}, "device": "cpu", "seed": 0}


def make_run(
    root: Path,
    values: Sequence[float],
    seed: int = 0,
    method: str = "heatkv",
    budget: float = 0.1,
    calibration: int | None = None,
    name: str = "psnr",
    kind: str = "",
    settings: Mapping[str, object] | None = None,
    sample: str = "",
    **config: object,
) -> Results:
    """A finished run with a folder: one sample of each prompt with a value of one metric."""
    known = {"calibration_sha256": None if calibration is None else f"{calibration}", "weights_sha256": "5"}
    whole = {**CONFIG, "seed": seed, "calibrate": {"count": 10, "seed": calibration or 1}, **config}
    whole["method"] = settings or whole["method"]
    finite = [value for value in values if np.isfinite(value)]
    metric = Metric(float(np.mean(finite)), "higher", n=len(finite), ci95=(0.0, 1.0), evaluator=name)
    run = made_up(
        method,
        budget,
        {name: metric},
        "m",
        n=len(values),
        config=whole,
        provenance=known,
        run=f"{method}-{budget}-{seed}-{calibration}{kind}",
        reference=None if method == "full" else f"full-{seed}",
    )
    folder = root / "m" / run.run
    sha256 = hash_values([*values, sample or run.run])
    lines = [
        {"index": i, "seed": seed, "prompt": f"prompt {i}", "sha256": sha256} for i in range(len(values))
    ]
    write_metric(folder, name, MetricSpec("higher"), Score(metric.value, len(values)), values)
    write_lines(folder, lines)
    return run


def write_metric(
    folder: Path, name: str, spec: MetricSpec, score: Score, values: Sequence[float] | None
) -> None:
    samples = None if values is None else {"index": list(range(len(values))), name: list(values)}
    Result(name, "made up", "ok", None, {name: spec}, {name: score}, samples).save(folder / "metrics")


TABLE = np.array([[1.0, 3.0], [2.0, 6.0], [6.0, 9.0]])
"""Values of three prompts at two seeds: mean squares 15.5 of prompts, 13.5 of seeds and 0.5 of the rest."""
VARIANCE = (15.5 + 13.5 - 0.5) / 6
FREE = 28.5**2 / (15.5**2 / 2 + 13.5**2 / 1 + 0.5**2 / 2)
REACH = float(stats.t.ppf(0.975, FREE)) * VARIANCE**0.5


@pytest.fixture
def pair(tmp_path: Path) -> list[Results]:
    """Runs of `TABLE`'s two seeds."""
    return [make_run(tmp_path, TABLE[:, seed], seed) for seed in (0, 1)]


def test_runs_that_differ_in_the_seed_alone_are_one_row(pair: list[Results], tmp_path: Path) -> None:
    [row] = combine_seeds(pair[::-1], tmp_path)
    assert isinstance(row, Combined)
    assert list_members(row) == (*pair,)
    assert (row.n, name_count(row), row.run) == (3, "3 x 2", pair[0].run)
    metric = row.metrics["psnr"]
    assert isinstance(metric, MeanMetric)
    assert (metric.value, metric.runs, metric.n, metric.evaluator) == (4.5, 2, 3, "psnr")
    assert metric.interval == pytest.approx((4.5 - REACH, 4.5 + REACH))
    assert metric.df == pytest.approx(FREE)
    assert metric.between == pytest.approx(((13.5 - 0.5) / 3) ** 0.5)
    assert not metric.prompts_only
    path = tmp_path / "m" / pair[1].run / "samples.jsonl"
    path.write_text(path.read_text().replace("prompt 2", "prompt 3"))
    assert combine_seeds(pair, tmp_path) == pair


def store(dtype: str, **changed: object) -> dict[str, object]:
    return {"cache_dtype": dtype, "storage": {"keys": "channel", "residual": 0, **changed}}


ALONE: Sequence[Mapping[str, object]] = (
    {"method": "snapkv"}, {"budget": 0.2}, {"calibration": 1}, {"values": [1.0, 2.0]}, {"prompts": {"count": 9}},
    {"cache_dtype": "int4"}, {"batch_size": 4}, {"device": "cuda"}, {"model": {"name": "m", "cfg": 2}},
    {"settings": {"sinks": 2}},
)  # fmt: skip
"""Settings that make a run a row of its own."""
PAIRS: Sequence[tuple[Mapping[str, object], Mapping[str, object], bool]] = (
    *(({}, own, False) for own in ALONE),
    ({"device": "cuda:0"}, {"device": "cuda:1"}, True),
    *(
        ({"model": {"name": "m", name: "a"}}, {"model": {"name": "m", name: "b"}}, True)
        for name in ("sources", "default_eval")
    ),
    (store("auto"), store("auto", keys="rotated", residual=128), True),
    (store("fp8"), store("fp8", keys="rotated"), True),
    (store("fp8"), store("fp8", residual=128), False),
    (store("int4"), store("int4", keys="rotated"), False),
    ({"sinks": 0}, {"sinks": 1}, True),
)
"""Settings of two runs with two seeds, and whether they are one row: settings without effect split none."""


@pytest.mark.parametrize(("first", "second", "joined"), PAIRS, ids=str)
def test_runs_that_differ_in_anything_else_are_not_joined(
    tmp_path: Path, first: Mapping[str, object], second: Mapping[str, object], *, joined: bool
) -> None:
    runs = [
        make_run(tmp_path, **{"values": TABLE[:, 0], "seed": seed, **own})
        for seed, own in enumerate((first, second))
    ]
    assert group_seeds(runs) == ([runs] if joined else [runs[:1], runs[1:]])
    old, new = (replace(runs[0], finished=f"2026-0{month}") for month in (1, 2))
    assert group_seeds([new, old]) == group_seeds([old, new]) == [[new]]


def test_an_interval_wider_than_the_range_gives_way_to_prompts_alone(tmp_path: Path) -> None:
    data = np.array([[0.5, 0.9], [0.51, 0.92], [0.52, 0.93]])
    runs = [make_run(tmp_path, data[:, seed], seed, name="ssim") for seed in (0, 1)]
    [row] = combine_seeds(runs, tmp_path)
    metric = row.metrics["ssim"]
    assert isinstance(metric, MeanMetric)
    means = data.mean(1)
    reach = stats.t.ppf(0.975, 2) * means.std(ddof=1) / 3**0.5
    assert (metric.prompts_only, metric.df) == (True, 2)
    assert metric.interval == pytest.approx((means.mean() - reach, means.mean() + reach))
    runs = [make_run(tmp_path, data[:, seed], seed, name="psnr") for seed in (0, 1)]
    low, high = combine_seeds(runs, tmp_path)[0].metrics["psnr"].interval or (0, 0)
    assert high - low > 1  # without bounds, nothing is narrowed


def test_costs_are_bounds_and_mean_times(tmp_path: Path) -> None:
    runs = []
    for seed, peak, least, time in ((0, 90, 0.99, 1.0), (1, 95, 0.5, 3.0)):
        run = make_run(tmp_path, TABLE[:, seed], seed)
        memory = replace(run.memory, peak_tokens=peak, least_share=least)
        runs.append(replace(run, memory=memory, latency=replace(run.latency, seconds_per_image=time)))
    [row] = combine_seeds(runs, tmp_path)
    assert (row.memory.peak_tokens, row.memory.least_share, row.memory.budget_unit) == (95, 0.5, "tokens")
    assert (row.latency.seconds_per_image, row.latency.device) == (2.0, "cpu")


def test_a_metric_of_the_whole_set_needs_three_seeds_for_an_interval(tmp_path: Path) -> None:
    runs = []
    for seed, value in enumerate((2.0, 3.0, 7.0)):
        run = make_run(tmp_path, TABLE[:, 0], seed)
        metric = Metric(value, "lower", n=3, ci95=(0.0, 1.0), evaluator="fid")
        write_metric(tmp_path / "m" / run.run, "fid", MetricSpec("lower"), Score(value, 3), None)
        runs.append(replace(run, metrics={"fid": metric}))
    [two] = combine_seeds(runs[:2], tmp_path)
    assert (two.metrics["fid"].value, two.metrics["fid"].interval) == (2.5, None)
    [three] = combine_seeds(runs, tmp_path)
    reach = stats.t.ppf(0.975, 2) * 7**0.5 / 3**0.5  # variance (4 + 1 + 9) / 2
    assert three.metrics["fid"].interval == pytest.approx((0, 4 + reach))  # 4 - reach is out of its range
    assert isinstance(three.metrics["fid"], MeanMetric)
    assert three.metrics["fid"].df == 2


def test_a_metric_that_one_seed_lacks_has_no_value(pair: list[Results], tmp_path: Path) -> None:
    [row] = combine_seeds([pair[0], replace(pair[1], metrics={})], tmp_path)
    assert (row.metrics["psnr"].value, row.metrics["psnr"].status) == (None, "skipped")
    failed = Metric(None, "higher", status="failed", reason="memory")
    [row] = combine_seeds([pair[0], replace(pair[1], metrics={"psnr": failed})], tmp_path)
    assert row.metrics["psnr"] == failed


def test_seeds_and_calibrations_are_one_row_with_the_wider_interval(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = rng.normal(30, 1, (6, 1, 1)) + np.array([[[0.0], [4.0]]]) + rng.normal(0, 0.3, (6, 2, 3))
    runs = [
        make_run(tmp_path, data[:, seed, calibration], seed, calibration=calibration + 1)
        for seed in (0, 1)
        for calibration in (0, 1, 2)
    ]
    [row] = combine_seeds(runs, tmp_path)
    assert (name_count(row), count_seeds(row)) == ("6 x 2 x 3", (2, 3))
    means = [make_run(tmp_path, data[:, seed].mean(1), seed, "seeds") for seed in (0, 1)]
    [by_seed] = combine_seeds(means, tmp_path)
    assert row.metrics["psnr"].interval == pytest.approx(by_seed.metrics["psnr"].interval)


def test_differences_pair_the_same_prompt_seed_and_calibration(tmp_path: Path) -> None:
    other = np.array([[5.0, 1.0], [9.0, 2.0], [4.0, 8.0]])
    ours = [make_run(tmp_path, other[:, seed] + TABLE[:, seed], seed) for seed in (0, 1)]
    theirs = [make_run(tmp_path, other[:, seed], seed, "random") for seed in (0, 1)]
    third = make_run(tmp_path, [100.0, 0.0, 7.0], 2, "random")  # a seed that the other side lacks
    row, base = combine_seeds([*ours, *theirs, third], tmp_path)
    difference = compare_seeds(row, base, tmp_path)["psnr"]
    assert difference.value == 4.5
    assert difference.interval == pytest.approx((4.5 - REACH, 4.5 + REACH))
    single = compare_seeds(row, theirs[1], tmp_path)["psnr"]
    assert single.value == pytest.approx(6)  # seed 1 alone: 3, 6 and 9
    assert compare_seeds(row, third, tmp_path) == {}
    ours = [make_run(tmp_path, TABLE[:, c] + 10 * c, calibration=c + 1) for c in (0, 1)]
    theirs = [make_run(tmp_path, np.full(3, 10.0 * c), 0, "hackpp", calibration=c + 1) for c in (0, 1)]
    row, base = combine_seeds([*ours, *theirs], tmp_path)
    assert compare_seeds(row, base, tmp_path)["psnr"].interval == pytest.approx((4.5 - REACH, 4.5 + REACH))


@examples(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(2, 50, width=32), min_size=2, max_size=6),
    st.integers(2, 4),
    st.floats(-10, 10, width=32),
)
def test_equal_seeds_have_the_mean_and_the_interval_of_one(
    values: list[float], count: int, shift: float
) -> None:
    with TemporaryDirectory() as name:
        root = Path(name)
        runs = [make_run(root, values, seed) for seed in range(count)]
        [row] = combine_seeds(runs, root)
        assert row.metrics["psnr"].value == pytest.approx(np.mean(values), abs=1e-9)
        se = np.std(values, ddof=1) / len(values) ** 0.5
        reach = stats.t.ppf(0.975, len(values) - 1) * se
        assert row.metrics["psnr"].interval == pytest.approx(
            (np.mean(values) - reach, np.mean(values) + reach), abs=1e-6
        )
        moved = [make_run(root, [value + shift for value in values], seed, "random") for seed in range(count)]
        [base] = combine_seeds(moved, root)
        assert compare_seeds(row, base, root)["psnr"].value == pytest.approx(-shift, abs=1e-4)


def test_seeds_that_change_no_sample_count_once(tmp_path: Path) -> None:
    greedy = [make_run(tmp_path, [2.0, 3.0, 5.0], seed, sample="the same") for seed in (0, 1)]
    drawn = [make_run(tmp_path, TABLE[:, seed], seed, "random") for seed in (0, 1)]
    row, other = combine_seeds([*greedy, *drawn], tmp_path)
    assert row.metrics == greedy[0].metrics
    assert (name_count(row), name_count(other)) == ("3", "3 x 2")
    notes = printed(160, show_runs, [row, other])
    assert "Seeds change no sample of heatkv: each counts once." in notes
    kinds = [type(compare_seeds(row, one, tmp_path)["psnr"]) for one in (row, other)]
    assert kinds == [Metric, MeanMetric]


def test_tables_and_figures_have_the_mean_or_each_seed(pair: list[Results], tmp_path: Path) -> None:
    joined = combine_seeds(pair, tmp_path)
    text = printed(160, show_runs, joined)
    assert text.count("heatkv") == 1
    assert f"4.5000 ±{REACH:.4f} df 2.7" in text
    assert "Means over seeds; n: prompts x seeds" in text
    assert [row["noise seed"] for row in make_rows(pair)] == ["0", "1"]
    assert "noise seed" not in make_rows(joined)[0]
    assert len({find_group(run) for run in pair}) == 2  # the luckier seed beats no other one
    [row] = csv.DictReader(io.StringIO(format_csv(make_csv_rows(joined))))
    assert [row[name] for name in ("n", "seeds", "calibrations")] == ["3", "2", "1"]
    assert float(row["psnr df"]) == pytest.approx(FREE)
    assert row["psnr interval"] == "two-way, t 2.7"
    [point] = trace_curves(joined, "psnr")["heatkv"]
    assert (point.value, point.low, point.high) == pytest.approx((4.5, 4.5 - REACH, 4.5 + REACH))
    assert list(trace_curves(pair, "psnr")) == ["heatkv noise seed=0", "heatkv noise seed=1"]


def test_an_ablation_is_over_no_seed(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, TABLE[:, seed] + sinks, seed, kind=f"-{sinks}", settings={"sinks": sinks})
        for seed in (0, 1)
        for sinks in (1, 2)
    ]
    [ablation] = find_ablations(combine_seeds(runs, tmp_path))
    assert (ablation.setting, ablation.others) == ("method.sinks", {})
    assert "n = 3 x 2" in name_ablation(ablation)
    each = find_ablations(runs)
    assert [one.setting for one in each] == ["method.sinks"] * 2
    assert [one.others for one in each] == [{"noise seed": "0"}, {"noise seed": "1"}]


def test_means_that_are_kept_are_the_same_and_follow_changes(
    pair: list[Results], tmp_path: Path, settled: None
) -> None:
    first = combine_seeds(pair, tmp_path)
    assert (tmp_path / KEPT).is_file()
    assert combine_seeds(pair, tmp_path) == first
    [path] = (tmp_path / "m" / pair[0].run / "metrics").glob("*.samples.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    changed = combine_seeds(pair, tmp_path)
    (tmp_path / KEPT).unlink()
    assert first != changed == combine_seeds(pair, tmp_path)
