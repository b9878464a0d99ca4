"""Divergence over positions in the report: the figure, the table of the tail, the worst places on the console."""

import re
from pathlib import Path

import pytest

from kvbench.report.document import make_tail, write_report
from kvbench.report.drifts import KEPT, group_drifts, read_drifts
from kvbench.report.figures.draw import draw_figures
from kvbench.report.one_run import show_outcome
from kvbench.report.seeds import Combined
from kvbench.runs.record.results import Outcome, Results
from tests.support.results import printed
from tests.support.run_folders import HOSTILE, TEXTS, write_image_runs, write_reading_runs


@pytest.fixture
def runs(tmp_path: Path) -> list[Results]:
    return write_reading_runs(tmp_path, TEXTS)


def test_the_report_has_the_tail_of_kl_and_a_figure(tmp_path: Path, runs: list[Results]) -> None:
    images = write_image_runs(tmp_path)
    tail = make_tail(tmp_path, [*runs, *images])
    assert tail is not None
    assert [row["method"] for row in tail.rows] == ["h2o", "snapkv"]
    shown = [[row[f"kl {name}"] for name in ("median", "largest")] for row in tail.rows]
    assert shown == [["0.1875", "0.2500"], ["0.0000", "4.0000"]]
    text = write_report(tmp_path, runs, [tail]).read_text()
    assert "| snapkv | 0.1 | 2 |" in text
    assert "KL over positions" in (tmp_path / "report.tex").read_text()
    drawn, left_out = draw_figures(tmp_path, runs, tmp_path)
    assert ([path.name for path in drawn], left_out) == (["drift.png"], [])
    picture = (tmp_path / "drift.svg").read_text()
    assert all(word in picture for word in ("snapkv", "h2o", "KL(full || method), nats ↓"))
    assert "full</text>" not in picture
    assert make_tail(tmp_path, images) is None


def test_divergence_is_computed_once(tmp_path: Path, runs: list[Results], settled: None) -> None:
    before = read_drifts(tmp_path, runs)
    assert (tmp_path / KEPT).is_file()
    for path in tmp_path.glob("*/snapkv-*/readings/*"):
        path.write_bytes(b"")
    assert read_drifts(tmp_path, runs) == before
    (tmp_path / KEPT).unlink()
    assert [run.method for run, _ in read_drifts(tmp_path, runs)] == ["h2o"]  # damaged files are left out
    for path in tmp_path.glob("*/h2o-*/samples.jsonl"):
        path.write_bytes(b"\xff{")
    assert read_drifts(tmp_path, runs) == []


def test_a_figure_is_of_one_model_and_its_texts_and_a_mean_over_seeds_of_all_runs(
    tmp_path: Path, runs: list[Results]
) -> None:
    _, snapkv, h2o = runs
    joined = Combined(**{**vars(snapkv), "members": (snapkv, h2o)})
    [(_, drift)] = read_drifts(tmp_path, [joined])
    assert drift.kl[3].mean == pytest.approx((3 + 1 + 0.125 + 0.25) / 4)
    assert drift.kl[3].low is not None
    other = write_reading_runs(tmp_path, {"h2o": ((0.5,) * 8,)}, "decoder")
    short = write_reading_runs(tmp_path, {"h2o": ((0.5,) * 5,)}, "short")
    groups = group_drifts(tmp_path, [*runs, *other, *short])
    assert {
        where: {budget: set(own) for budget, own in group.items()} for where, group in groups.items()
    } == {
        "decoder (texts), n = 1": {"0.1": {"h2o"}},
        "short (texts), n = 1": {"0.1": {"h2o"}},
        "smollm2_135m (texts), n = 2": {"0.1": {"h2o", "snapkv"}},
    }


def test_the_console_shows_the_worst_places(tmp_path: Path, runs: list[Results]) -> None:
    def show(run: Results, *, verbose: bool = True) -> str:
        folder = tmp_path / run.model / run.run
        return printed(220, lambda console: show_outcome(console, Outcome(folder, run), verbose=verbose))

    full, snapkv, _ = runs
    lines = [line for line in show(snapkv).splitlines() if re.match(r"\s+\d+\s+\d+\s+\d+\.\d{3} ", line)]
    assert [" ".join(line.split()[:3]) for line in lines[:3]] == ["1 8 4.000", "0 4 3.000", "0 8 2.000"]
    assert "It was the best of times: 0a hen and[a]" in lines[1]
    assert "a hen⏎a" in lines[0]
    assert HOSTILE[:20] in lines[0]
    assert "largest KL" not in show(snapkv, verbose=False) + show(full)  # nothing diverges from itself
    next((tmp_path / snapkv.model / snapkv.run).glob("readings/*")).write_bytes(b"torn")
    assert "largest KL" not in show(snapkv)
