"""The table over calibrations joins runs that differ in the calibration's seed alone, and no others."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.protocol.crossed import cross_runs
from kvbench.eval.protocol.scores import Metric, MetricSpec, Score
from kvbench.report.calibrations import group_calibrations, make_calibration_rows, show_calibrations
from kvbench.runs.record.results import Results
from tests.support.image_sets import SCORED, run_folder
from tests.support.results import made_up, printed

SETTINGS = {
    "model": {"name": "m"},
    "method": {"sinks": 1},
    "prompts": {"count": SCORED},
    "storage": {"keys": "channel"},
    "seed": 0,
    "cache_dtype": "auto",
    "batch_size": 8,
    "batch_invariant": False,
    "device": "cpu",
}
PSNR = {"psnr": MetricSpec("higher", "dB", digits=2)}


def make_run(
    seed: int = 1,
    method: str = "heatkv",
    budget: float = 0.1,
    calibrate: Mapping[str, object] | None = None,
    calibrated: bool = True,
    **more: object,
) -> Results:
    fields = {name: more.pop(name) for name in ("n", "reference", "finished", "metrics") if name in more}
    config = {**SETTINGS, "calibrate": {"count": 10, "seed": seed, **(calibrate or {})}, **more}
    known = {"calibration_sha256": f"{seed}" if calibrated else None}
    metrics = fields.pop("metrics", {})
    name = f"{method}-{budget}-{seed}"
    return made_up(method, budget, metrics, "m", config=config, provenance=known, run=name, **fields)


def seeds(groups: list[list[Results]]) -> list[list[object]]:
    return [[run.setting("calibrate.seed") for run in group] for group in groups]


def test_runs_that_differ_in_the_seed_alone_are_one_row() -> None:
    runs = [make_run(seed, calibrate={"orders": f"{seed}.json"}) for seed in (3, 1, 2)]
    assert seeds(group_calibrations(runs)) == [[1, 2, 3]]
    assert group_calibrations(runs[:1]) == []


@pytest.mark.parametrize(
    "other",
    [
        {"method": "hackpp"},
        {"budget": 0.2},
        {"n": 12},
        {"reference": "full-1"},
        {"calibrate": {"count": 40}},
        {"calibrate": {"prompts": "my.txt"}},
        {"calibrate": {"batch_size": 1}},
        {"prompts": {"count": SCORED, "held_out": True}},
        {"storage": {"keys": "token"}},
        {"seed": 1},
        {"cache_dtype": "int4"},
        {"batch_size": 4},
        {"batch_invariant": True},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_runs_that_differ_in_anything_else_are_not_joined(other: dict[str, object]) -> None:
    values = {"seed": other.pop("seed", 0)}
    third = make_run(3, **other)
    third = replace(third, config={**third.config, "seed": values["seed"]})
    assert seeds(group_calibrations([make_run(1), make_run(2), third])) == [[1, 2]]


def test_settings_of_the_method_keep_rows_apart() -> None:
    third = make_run(3)
    third = replace(third, config={**third.config, "method": {"sinks": 2}})
    assert seeds(group_calibrations([make_run(1), make_run(2), third])) == [[1, 2]]


def test_of_two_runs_with_one_seed_the_later_counts() -> None:
    old, new = make_run(2, finished="2026-01-01"), make_run(2, finished="2026-02-01")
    [group] = group_calibrations([make_run(1), new, old])
    assert group[1] is new


def test_methods_without_a_calibration_stand_beside() -> None:
    runs = [make_run(1), make_run(2), make_run(1, "random", calibrated=False)]
    others = [
        make_run(1, "hackpp"),
        make_run(1, "random", 0.2, calibrated=False),
        made_up("full", 1, {}, config={**SETTINGS}),
    ]
    assert [group[0].method for group in group_calibrations([*runs, *others])] == ["heatkv", "random"]


@pytest.fixture
def scored(tmp_path: Path) -> list[Results]:
    """Runs with folders: three calibrations, and `random`."""
    rng = np.random.default_rng(0)
    base, runs = rng.normal(30, 3, SCORED), []
    for number, (seed, method) in enumerate([(1, "heatkv"), (2, "heatkv"), (3, "heatkv"), (1, "random")]):
        values = base + number + rng.normal(0, 0.5, SCORED)
        metric = Metric(values.mean(), "higher", "dB", SCORED, ci95=(1.0, 2.0), evaluator="made-up", digits=2)
        run = make_run(seed, method, n=SCORED, metrics={"psnr": metric}, calibrated=method != "random")
        score = {"psnr": Score(values.mean(), SCORED)}
        run_folder(tmp_path / "m" / run.run, {"psnr": values.tolist()}, PSNR, score)
        runs.append(run)
    return runs


def test_a_row_has_the_mean_over_calibrations_and_their_spread(scored: list[Results], tmp_path: Path) -> None:
    folders = [tmp_path / "m" / run.run for run in scored]
    crossed = cross_runs(folders[:3])["psnr"]
    first, second = make_calibration_rows(scored, tmp_path)
    wanted = {"method": "heatkv", "calibrations": "3", "of prompts": "10", "n": str(SCORED)}
    assert wanted.items() <= first.items()
    assert (first["psnr"], first["psnr sd"]) == (crossed.mean, f"{crossed.between:.2f}")
    assert float(str(first["psnr sd"])) == pytest.approx(1, abs=0.2)  # of means 30, 31 and 32
    assert (second["method"], second["calibrations"], second["psnr sd"]) == ("random", "-", "-")
    assert second["psnr"] is scored[3].metrics["psnr"]
    [difference] = make_calibration_rows(scored, tmp_path, "random")
    assert difference["psnr"] == cross_runs(folders[:3], folders[3])["psnr"].mean
    assert make_calibration_rows(scored, tmp_path, "h2o") == []


def test_a_difference_is_to_one_run(scored: list[Results], tmp_path: Path) -> None:
    assert make_calibration_rows(scored, tmp_path, "heatkv") == []  # which of its calibrations?
    base = scored[3]
    other = replace(base, config={**base.config, "batch_size": 4})
    assert len(make_calibration_rows([*scored, other], tmp_path)) == 3
    assert make_calibration_rows([*scored, other], tmp_path, "random") == []


def test_tables_are_printed_and_written(scored: list[Results], tmp_path: Path) -> None:
    text = printed(200, show_calibrations, scored, tmp_path, tmp_path, "random")
    assert text.count("Over calibrations: ") == 2
    written = (tmp_path / "report-calibrations.md").read_text()
    assert "| m | heatkv | 0.1 | 3 | 10 | 60 |" in written
    assert (tmp_path / "report-calibrations-against-random.md").exists()
    assert printed(200, show_calibrations, scored[:1], tmp_path, tmp_path) == ""
