"""Plots show every point with its interval; the stability of rankings equals a slow loop."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from PIL import Image

from kvbench.eval.protocol.scores import Metric
from kvbench.methods.heatkv.scores import rank_heads, scas
from kvbench.report.figures import plots, styles
from kvbench.report.papers.stability import rank_deviation
from kvbench.runs.record.results import Results
from tests.support.results import made_up

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
