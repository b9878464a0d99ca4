"""The table over calibrations has methods with several calibrations, and others beside them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.crossed import cross_runs
from kvbench.report.differences import choose_calibrated, find_pairs, make_calibration_rows, show_calibrations
from kvbench.report.seeds import combine_seeds
from kvbench.runs.record.results import Results
from tests.report.test_seeds import make_run
from tests.support.results import made_up, printed

COUNT = 30


@pytest.fixture
def scored(tmp_path: Path) -> list[Results]:
    """Three calibrations of heatkv, and `random`."""
    rng = np.random.default_rng(0)
    base, runs = rng.normal(30, 3, COUNT), []
    for number, calibration in enumerate((1, 2, 3, None)):
        values = base + number + rng.normal(0, 0.5, COUNT)
        method = "heatkv" if calibration else "random"
        runs.append(make_run(tmp_path, values, 0, method, calibration=calibration))
    return runs


def test_a_row_has_the_mean_over_calibrations_and_their_spread(scored: list[Results], tmp_path: Path) -> None:
    folders = [tmp_path / "m" / run.run for run in scored]
    runs = combine_seeds(scored, tmp_path)
    crossed = cross_runs(folders[:3])["psnr"]
    first, second = make_calibration_rows(runs, tmp_path)
    wanted = {"method": "heatkv", "calibrations": "3", "of prompts": "10", "n": f"{COUNT} x 1 x 3"}
    assert wanted.items() <= first.items()
    for name in ("value", "n", "se", "ci95", "ci"):
        assert vars(first["psnr"])[name] == vars(crossed.mean)[name]
    assert first["psnr sd"] == f"{crossed.between:.4f}"
    assert float(str(first["psnr sd"])) == pytest.approx(1, abs=0.2)  # of means 30, 31 and 32
    assert (second["method"], second["calibrations"], second["psnr sd"]) == ("random", "-", "-")
    assert second["psnr"] is scored[3].metrics["psnr"]
    [difference] = make_calibration_rows(runs, tmp_path, "random")
    assert vars(difference["psnr"])["ci95"] == cross_runs(folders[:3], folders[3])["psnr"].mean.ci95
    [back] = make_calibration_rows(runs, tmp_path, "heatkv")
    assert vars(back["psnr"])["value"] == pytest.approx(-vars(difference["psnr"])["value"])


def test_differences_are_to_one_row_and_methods_without_a_calibration_stand_beside(
    scored: list[Results], tmp_path: Path
) -> None:
    others = [
        make_run(tmp_path, np.ones(COUNT), 0, "hackpp", calibration=1),
        make_run(tmp_path, np.ones(COUNT), 0, "random", 0.2),
        made_up("full", 1, {}),
    ]
    rows = combine_seeds([*scored, *others], tmp_path)
    assert [run.method for run in choose_calibrated(rows)] == ["heatkv", "random"]
    base = scored[3]
    other = replace(base, config={**base.config, "batch_size": 4}, run="random-0.1-other")
    rows = combine_seeds([*scored, other], tmp_path)
    assert len(make_calibration_rows(rows, tmp_path)) == 3
    assert make_calibration_rows(rows, tmp_path, "random") == []
    with pytest.raises(ConfigError, match=r"set it to one of random-0\.1-0-None .*, random-0\.1-other "):
        find_pairs([scored[0], base, other], "random")


def test_tables_are_printed_and_written(scored: list[Results], tmp_path: Path) -> None:
    runs = combine_seeds(scored, tmp_path)
    text = printed(200, show_calibrations, runs, tmp_path, tmp_path, "random")
    assert text.count("Over calibrations: ") == 2
    written = (tmp_path / "report-calibrations.md").read_text()
    assert "| m | heatkv | 0.1 | 3 | 10 | 30 x 1 x 3 |" in written
    assert "Means over calibrations; n: prompts x seeds x calibrations" in written
    assert (tmp_path / "report-calibrations-against-random.md").exists()
    assert printed(200, show_calibrations, combine_seeds(scored[:1], tmp_path), tmp_path, tmp_path) == ""
