"""Plots show every point with its interval, or every step; the stability of rankings equals a slow loop."""

import io
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from omegaconf import OmegaConf
from PIL import Image

from kvbench.engine.ledger import Step
from kvbench.eval.protocol.scores import Metric
from kvbench.methods.heatkv.scores import rank_heads, scas
from kvbench.report.figures import draw, lines, plots, styles
from kvbench.report.papers import comparison, published
from kvbench.report.papers.stability import rank_deviation
from kvbench.runs.record.results import Results
from tests.report.test_conditions import bounded
from tests.support.places import ROOT
from tests.support.results import made_up, printed
from tests.support.texts import check_text

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


def describe(figure: Figure) -> str:
    """What a figure shows: axes, lines, bands and legends, with colours and numbers."""
    width, height = figure.get_size_inches()
    parts = [f"{figure.get_suptitle()}, {width:g} x {height:g}\n"]
    for axes in figure.axes:
        place = axes.get_subplotspec()
        shape = "" if place is None else f" {place.get_geometry()[:3]}"
        parts.append(f"axes{shape} {axes.get_title()}: {axes.get_xlabel()} | {axes.get_ylabel()}\n")
        for line in axes.lines:
            look = f"{line.get_color()} {line.get_marker()} {line.get_linestyle()} {line.get_linewidth()}"
            points = zip(*(np.asarray(side, float).round(6) for side in line.get_data()), strict=True)
            parts.append(f"  {look}: {' '.join(f'({x:g}, {y:g})' for x, y in points)}\n")
        for one in axes.collections:
            kind = "band" if isinstance(one, PolyCollection) else "ends"
            corners = sorted({tuple(corner.round(6)) for path in one.get_paths() for corner in path.vertices})
            parts.append(f"  {kind}: {' '.join(f'({x:g}, {y:g})' for x, y in corners)}\n")
        bars = " ".join(f"{bar.get_height():g}" for bar in axes.patches if isinstance(bar, Rectangle))
        parts.append(f"  bars: {bars}; ticks: {axes.get_xticks().tolist()}\n" if bars else "")
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "".join([*parts, f"  legend: {', '.join(names)}\n"])


def test_rank_deviation_equals_a_loop() -> None:
    rng = torch.Generator().manual_seed(3)
    base, *others = (torch.rand(2, 3, 5, 5, generator=rng, dtype=torch.float64) for _ in range(5))
    calibrations = [(base + 0.3 * other).tril() for other in others]
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
    mass = calibrations[0]
    assert rank_deviation([mass, 2 * mass]).tolist() == [0.0] * 4
    for few in ([mass], [mass, mass[:1]]):
        with pytest.raises(ValueError, match="two or more calibrations of one model"):
            rank_deviation(few)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Figures by the name of their file, which is not written."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(styles, "save", lambda figure, path: figures.update({path.name: figure}) or path)
    return figures


def test_figures_show_their_numbers(saved: dict[str, Figure], tmp_path: Path) -> None:
    """Of runs of 96 images and of 16, of budgets in bytes and tokens, of steps, ranks and batches."""
    several, parts = [], []
    for budget in (0.1, 0.2):
        for p in (0.7, 0.9):
            config = {"model": {"name": "m"}, "method": {"sinks": 1, "p": p}}
            several.append(made_up("hard_kv", budget, {"psnr": Metric(budget + p, "higher")}, config=config))
        values = dict.fromkeys(("is", "dpg", "dpg/entity", "kid", "mine", "dists"), budget) | {
            "constant": 1.0
        }
        kinds = {name: {"evaluator": name.partition("/")[0], "detail": "/" in name} for name in values}
        own = {name: Metric(value, "lower", **kinds[name]) for name, value in values.items()}
        parts.append(made_up("heatkv", budget, own))
    units = [bounded("heatkv", budget, 30.0 + budget, "int4") for budget in (0.1, 0.2)]
    units += [bounded("swa", budget, 30.0, unit="bytes") for budget in (0.1, 0.2)]
    many = [run(f"m{i:02}", b, psnr=20.0 + i) for i in range(18) for b in (0.1, 0.2)]
    worst = (2.0, "published: < 2 %")
    drawn = {
        "methods at two budgets, bands of those that have both": plots.draw_metrics(RUNS, "a model"),
        "one budget": plots.draw_metrics(RUNS[1:], "a model"),
        "of two runs the first": plots.draw_metrics([*RUNS, run("swa", 0.1, psnr=12.0)], "m", ["psnr"]),
        "chosen metrics": plots.draw_metrics(RUNS, "a model", ["lpips_scenes"]),
        "settings that differ": plots.draw_metrics(several, "m"),
        "settings that differ between budgets": plots.draw_metrics([several[0], *several[2:]], "m"),
        "metrics but parts and constants": plots.draw_metrics(parts, "a model"),
        "of many methods at most eight are in colour": plots.draw_metrics(many, "a model"),
        "bytes, if some run needs them": plots.draw_metrics(units, "m"),
        "ranks": [plots.draw_stability(np.array([1.0, 3.0, 2.0]), 50, 4, "a model", worst)],
        **{
            kind: [lines.draw_steps([told(0.5), told(0.25, STEPS[:2], "rkv")], kind, "a model")]
            for kind in lines.CURVES
        },
    }
    few = [run("h2o", 0.04, 16, fid=5.0), run("heatkv", 0.1, 16, fid=90.0)]
    fids = (("h2o", 0.1, 20.0), ("h2o", 0.2, 10.0), ("heatkv", 0.1, 30.0), ("heatkv", 0.2, 15.0))
    sweep = [run(name, share, 96, fid=fid) for name, share, fid in fids]
    for what, own in {"of 96 images": few, "of both": [*few, run("h2o", 0.1, 16, fid=4.0)]}.items():
        draw.draw_fidelity(tmp_path, [*sweep, *own], "fidelity")
        drawn |= {f"{name}, {what}": [figure] for name, figure in saved.items()}
        saved.clear()
    steps = [replace(run("hard_kv", 0.5, n, fid=1.0), steps=STEPS[:1]) for n in (4, 8)]
    printed(200, comparison.draw_steps, published.find("hard_kv_fig9"), steps, tmp_path)
    drawn |= {name: [figure] for name, figure in saved.items()}
    texts = (f"## {what}\n" + "".join(map(describe, figures)) for what, figures in drawn.items())
    check_text("figures.txt", "\n".join(texts))


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    figure = plots.draw_stability(np.array([1.0, 3.0, 2.0]), 50, 4, "a model", (2.0, "published: < 2 %"))
    first, second = (styles.save(figure, tmp_path / f"{i}.png").read_bytes() for i in range(2))
    assert first == second
    assert len(Image.open(io.BytesIO(first)).convert("RGB").getcolors(10**6)) > 10


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


def test_points_are_the_numbers_of_steps() -> None:
    points = {
        "utilisation": [(10, 100), (20, 75), (30, 50)],
        "density": [(12, 2.5), (9, 1.0)],  # the first step is the prompt
        "lse": [(10, 2.0), (20, 3.0), (30, 4.0)],
    }
    blank = [replace(step, lse=None, kept_lse=None) for step in STEPS]
    for kind, expected in points.items():
        assert lines.list_points(STEPS, lines.CURVES[kind]) == expected
        assert len(lines.list_points(blank, lines.CURVES[kind])) == 3 * (kind == "utilisation")
    on_a_line = [(x, 0.5 + 2 * log(x)) for x in (1.0, 3.0, 10.0, 200.0)]
    assert lines.fit_line(on_a_line) == pytest.approx((2, 0.5, 1))


FIGURES = {
    "hard_kv_fig9": {"SU %": "75"},
    "hard_kv_fig19": {"tokens kept": "10.33", "LSE kept": "1.833"},
    "hard_kv_fig20": {"LSE": "3", "LSE drift": "-0.5"},
}
"""Measured columns beside published figures."""


def test_a_sweep_ends_with_its_table_and_its_figure(tmp_path: Path) -> None:
    for name, columns in FIGURES.items():
        file = OmegaConf.load(ROOT / "conf" / "sweeps" / f"{name}.yaml")
        assert (file.published, file.hydra.sweeper.params["method.watch_lse"]) == (name, True)
        table = published.find(name)
        [row] = comparison.make_rows(table, [told(0.5)])
        assert {metric: row[metric] for metric in table.metrics} == columns
        assert not any(any(row.cells.values()) for rows in table.models.values() for row in rows)
    text = printed(200, comparison.show_comparison, table, [told(0.5, ())], tmp_path)
    assert "watch_lse" in text
    assert not (tmp_path / "hard_kv_fig20.png").exists()
    runs = [told(0.5), told(0.25, selector="rkv"), told(1, ())]
    printed(200, comparison.show_comparison, table, runs, tmp_path)
    assert (tmp_path / "hard_kv_fig20.png").read_bytes().startswith(b"\x89PNG")
