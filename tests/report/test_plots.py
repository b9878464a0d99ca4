"""Plots show every point with its interval, or every step; the stability of rankings equals a slow loop."""

import io
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from omegaconf import OmegaConf
from PIL import Image

from kvbench.engine.ledger import Step
from kvbench.eval.protocol.scores import Metric
from kvbench.methods.heatkv.scores import rank_heads, scas
from kvbench.report.figures import plots, step_plots, styles
from kvbench.report.papers import comparison, published
from kvbench.report.papers.stability import rank_deviation
from kvbench.runs.record.results import Results
from tests.support.places import ROOT
from tests.support.results import made_up, printed

BETTER = {"psnr": Metric(None, "higher", "dB"), "lpips_scenes": Metric(None, "lower")}


def run(method: str, budget: float, n: int = 4, **values: float) -> Results:
    metrics = {
        name: replace(BETTER.get(name, Metric(None, "lower")), value=value, ci95=(value - 0.5, value + 1.0))
        for name, value in values.items()
    }
    return made_up(method, budget, metrics, n=n)


RUNS = [
    run("heatkv", 0.2, psnr=30.0, lpips_scenes=0.1),
    run("heatkv", 0.1, psnr=25.0, lpips_scenes=0.2),
    run("full", 1.0),
    run("swa", 0.1, psnr=20.0, lpips_scenes=0.4),
]


def masses(calibrations: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    base = torch.rand(2, 3, 5, 5, generator=rng, dtype=torch.float64)
    drawn = [
        base + 0.3 * torch.rand(2, 3, 5, 5, generator=rng, dtype=torch.float64) for _ in range(calibrations)
    ]
    return [mass.tril() for mass in drawn]


def test_rank_deviation_equals_a_loop() -> None:
    calibrations = masses(4)
    ranks = [rank_heads(scas(mass)) for mass in calibrations]
    found = rank_deviation(calibrations)
    assert found.shape == (4,)
    assert found.max() > 0.3
    for source in range(4):
        spread = 0.0
        for layer in range(2):
            for head in range(3):
                places = [int(rank[source, layer, head]) for rank in ranks]
                mean = sum(places) / 4
                spread += (sum((place - mean) ** 2 for place in places) / 4) ** 0.5 / 6
        assert found[source] == pytest.approx(spread, abs=1e-12)


def test_equal_calibrations_do_not_move_and_one_has_no_deviation() -> None:
    [mass] = masses(1)
    assert rank_deviation([mass, 2 * mass]).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="two or more"):
        rank_deviation([mass])
    with pytest.raises(ValueError, match="of one model"):
        rank_deviation([mass, mass[:1]])


def test_curves_are_sorted_and_leave_out_the_reference() -> None:
    found = plots.trace_curves(RUNS, "psnr")
    assert list(found) == ["heatkv", "swa"]
    assert found["heatkv"] == [(0.099, 25.0, 24.5, 26.0, RUNS[0].n), (0.198, 30.0, 29.5, 31.0, RUNS[0].n)]
    assert [
        point.value for point in plots.trace_curves([*RUNS, run("swa", 0.1, psnr=12.0)], "psnr")["swa"]
    ] == [20.0]


def test_settings_in_which_runs_differ_make_lines_of_their_own() -> None:
    def one(budget: float, psnr: float, **settings: object) -> Results:
        config = {"model": {"name": "m"}, "method": {"sinks": 1, **settings}}
        return made_up("hard_kv", budget, {"psnr": Metric(psnr, "higher")}, config=config)

    assert set(plots.trace_curves([one(0.1, 1, p=0.7), one(0.2, 2, p=0.9)], "psnr")) == {
        "hard_kv p=0.7",
        "hard_kv p=0.9",
    }
    runs = [one(budget, budget + p, p=p) for budget in (0.1, 0.2) for p in (0.7, 0.9)]
    found = plots.trace_curves(runs, "psnr")
    assert {name: [point.value for point in points] for name, points in found.items()} == {
        "hard_kv p=0.7": [0.1 + 0.7, 0.2 + 0.7],
        "hard_kv p=0.9": [0.1 + 0.9, 0.2 + 0.9],
    }


def test_fidelity_has_a_line_and_a_band_per_method_in_every_panel() -> None:
    [figure] = plots.draw_metrics(RUNS, "a model")
    first, second = figure.axes
    assert first.get_ylabel() == "psnr, dB (higher is better)"
    assert second.get_ylabel() == "lpips_scenes (lower is better)"
    for axes in figure.axes:
        assert axes.get_xlabel() == "measured memory, peak % of the full cache"
        assert len(axes.lines) == 2
        bands = [c for c in axes.collections if isinstance(c, PolyCollection)]
        assert len(bands) == 1  # of the method that has two budgets
    band = first.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (24.5, 31.0)
    assert len({line.get_color() for line in first.lines}) == 2
    assert [line.get_color() for line in first.lines] == [line.get_color() for line in second.lines]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["heatkv", "swa"]
    assert figure.get_suptitle() == "a model"


def test_every_metric_but_details_has_a_panel_in_the_order_of_the_runs() -> None:
    def measure(budget: float) -> dict[str, Metric]:
        names = ("is", "dpg", "dpg/entity", "kid", "mine", "dists", "constant")
        value = {"constant": 1.0}
        return {
            name: Metric(
                value.get(name, budget), "lower", evaluator=name.partition("/")[0], detail="/" in name
            )
            for name in names
        }

    runs = [made_up("heatkv", budget, measure(budget)) for budget in (0.1, 0.2)]
    assert list(plots.choose_panels(runs)) == ["is", "dpg", "kid", "mine", "dists"]
    assert plots.choose_panels(runs)["mine"] == "mine (lower is better)"
    [figure] = plots.draw_metrics(runs, "a model")
    assert [axes.get_ylabel().split()[0] for axes in figure.axes] == ["is", "dpg", "kid", "mine", "dists"]
    places = [axes.get_subplotspec().get_geometry()[:3] for axes in figure.axes]
    assert places == [(2, 4, place) for place in range(5)]


def test_one_budget_is_no_curve() -> None:
    assert plots.draw_metrics(RUNS[1:], "a model") == []


def test_of_many_methods_at_most_eight_are_in_colour() -> None:
    runs = [run(f"m{i:02}", b, psnr=20.0 + i) for i in range(18) for b in (0.1, 0.2)]
    figures = plots.draw_metrics(runs, "a model")
    named = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in figures]
    assert [len(names) for names in named] == [6, 6, 6]
    assert [name for names in named for name in names] == [f"m{i:02}" for i in range(18)]
    looks: list[tuple[str, str, str]] = []
    for figure in figures:
        lines = figure.axes[0].lines
        assert len(lines) == 18
        drawn = [line for line in lines if line.get_color() != plots.OTHERS]
        looks += [
            (str(line.get_color()), str(line.get_marker()), str(line.get_linestyle())) for line in drawn
        ]
    assert len(looks) == len(set(looks)) == 18
    assert len(plots.draw_metrics(runs[:16], "a model")) == 1


def test_chosen_metrics_are_the_panels() -> None:
    [figure] = plots.draw_metrics(RUNS, "a model", ["lpips_scenes"])
    assert [axes.get_ylabel() for axes in figure.axes] == ["lpips_scenes (lower is better)"]


def test_stability_shows_ranks_the_share_and_the_published_worst_case(tmp_path: Path) -> None:
    figure = plots.draw_stability(np.array([1.0, 3.0, 2.0]), 50, 4, "a model", (2.0, "published: < 2 %"))
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 3.0, 2.0]
    assert axes.get_xticks().tolist() == [4, 5, 6]
    [line] = axes.lines
    assert line.get_ydata()[0] == 1.0
    first, second = (styles.save(figure, tmp_path / f"{i}.png").read_bytes() for i in range(2))
    assert first == second
    picture = np.array(Image.open(io.BytesIO(first)).convert("RGB"))
    assert picture.shape[0] > 400
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10


# Figures of steps


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
