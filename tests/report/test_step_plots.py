"""Figures of steps: points are the steps' numbers, fits are exact on exact data, tables find their runs."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvbench.engine.ledger import Step
from kvbench.report.figures import step_plots
from kvbench.report.papers import comparison, published
from kvbench.runs.record.results import Results
from tests.support.places import ROOT
from tests.support.results import made_up, printed

FIGURES = ("hard_kv_fig9", "hard_kv_fig19", "hard_kv_fig20")
STEPS = (Step(10, 10, 10, 2.0, 2.0), Step(20, 12, 16, 3.0, 2.5), Step(30, 9, 18, 4.0, 1.0))


def told(budget: float, steps: tuple[Step, ...] = STEPS, selector: str = "snapkv") -> Results:
    """A run on reasoner_tiny that tells its steps."""
    config = {
        "model": {"name": "reasoner_tiny"},
        "method": {"selector": selector, "select": "top_k", "calibration": "none", "merge": "none", "p": 0.9},
        "prompts": {"_target_": "kvbench.prompts.math_tiny.MathTiny"},
    }
    one = made_up("hard_kv", budget, {}, config=config, steps=steps)
    return replace(one, memory=replace(one.memory, utilisation=0.75, lse_drift=-0.5))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("utilisation", [(10, 100), (20, 75), (30, 50)]),
        ("density", [(12, 2.5), (9, 1.0)]),  # the first step is the prompt
        ("lse", [(10, 2.0), (20, 3.0), (30, 4.0)]),
    ],
)
def test_points_are_the_numbers_of_steps(kind: str, expected: list[tuple[float, float]]) -> None:
    assert step_plots.list_points(STEPS, step_plots.CURVES[kind]) == expected
    blank = [replace(step, lse=None, kept_lse=None) for step in STEPS]
    assert len(step_plots.list_points(blank, step_plots.CURVES[kind])) == 3 * (kind == "utilisation")


def test_a_fit_finds_the_line_that_points_lie_on() -> None:
    points = [(x, 0.5 + 2 * log(x)) for x in (1.0, 3.0, 10.0, 200.0)]
    assert step_plots.fit_line(points) == pytest.approx((2, 0.5, 1))


def test_budgets_tell_lines_apart_where_there_are_several() -> None:
    assert step_plots.name_runs([told(0.5)]) == ["hard_kv"]
    assert step_plots.name_runs([told(0.5), told(0.25)]) == ["hard_kv, 50 %", "hard_kv, 25 %"]


@pytest.mark.parametrize("name", FIGURES)
def test_a_sweep_ends_with_its_table_and_its_figure(name: str, tmp_path: Path) -> None:
    file = OmegaConf.load(ROOT / "conf" / "sweeps" / f"{name}.yaml")
    assert (file.published, file.hydra.sweeper.params["method.watch_lse"]) == (name, True)
    table = published.find(name)
    runs = [told(0.5), told(0.25, selector="rkv"), told(1, ())]
    printed(200, comparison.show_comparison, table, runs, tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    rows = comparison.make_rows(table, [told(0.5)])
    [cells] = [{metric: row[metric] for metric in table.metrics} for row in rows]
    assert (
        cells
        == {
            "hard_kv_fig9": {"SU %": "75"},
            "hard_kv_fig19": {"tokens kept": "10.33", "LSE kept": "1.833"},
            "hard_kv_fig20": {"LSE": "3", "LSE drift": "-0.5"},
        }[name]
    )
    assert {cell for row in table.models.values() for one in row for cell in one.cells.values()} == {None}


def test_runs_that_tell_no_steps_have_no_figure(tmp_path: Path) -> None:
    table = published.find("hard_kv_fig20")
    text = printed(200, comparison.show_comparison, table, [told(0.5, ())], tmp_path)
    assert not (tmp_path / "hard_kv_fig20.png").exists()
    assert "watch_lse" in text
