"""Numbers of other samples never stand in one curve, nor compete for one best value; figures and tables say their n."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvbench.engine.ledger import Step
from kvbench.eval.protocol.scores import Metric
from kvbench.report.ablations import find_ablations
from kvbench.report.conditions import group_conditions
from kvbench.report.document import find_group, list_sections, write_latex
from kvbench.report.figures import draw, styles
from kvbench.report.papers import comparison, published
from kvbench.report.runs_table import show_runs
from kvbench.runs.record.results import Results
from tests.support.results import made_up, printed

SCENES = {"_target_": "kvbench.prompts.base.Scenes"}
PASSKEY = {"_target_": "kvbench.prompts.passkey.Passkey", "digits": None, "context": 512}


def run(method: str, budget: float, fid: float, n: int, prompts: Mapping[str, object] = SCENES) -> Results:
    config = {"model": {"name": "m"}, "method": {"kernel": 1}, "prompts": {**prompts, "count": n}}
    return made_up(method, budget, {"fid": Metric(fid, "lower")}, n=n, config=config)


SWEEP = [
    run(*one, 96) for one in (("h2o", 0.1, 20), ("h2o", 0.2, 10), ("heatkv", 0.1, 30), ("heatkv", 0.2, 15))
]
FEW = [run("h2o", 0.04, 5, 16), run("heatkv", 0.1, 90, 16)]
"""A sweep of 96 images and runs of 16, of a metric that depends on the number of images."""


def test_a_curve_has_one_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(styles, "save", lambda figure, path: figures.update({path.name: figure}) or path)
    draw.draw_fidelity(tmp_path, [*SWEEP, *FEW], "fidelity")
    [(name, figure)] = figures.items()  # methods of 16 images have one budget each
    assert name == "fidelity.png"
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[20, 10], [30, 15]]
    title = "m (scenes), n = 96: metrics against measured memory, 95 % bands"
    assert figure.get_suptitle() == title
    figures.clear()
    draw.draw_fidelity(tmp_path, [*SWEEP, *FEW, run("h2o", 0.1, 4, 16)], "fidelity")
    heights = {name: list(one.axes[0].lines[0].get_ydata()) for name, one in figures.items()}
    assert heights == {"fidelity-m-scenes-n-16.png": [5, 4], "fidelity-m-scenes-n-96.png": [20, 10]}
    figures.clear()
    steps = [replace(run("hard_kv", 0.5, 1, n), steps=(Step(9, 9, 9, 2.0, 2.0),)) for n in (4, 8)]
    printed(200, comparison.draw_steps, published.find("hard_kv_fig9"), steps, tmp_path)
    titles = {name: one.axes[0].get_title() for name, one in figures.items()}
    assert titles == {f"hard_kv_fig9-m-scenes-n-{n}.png": f"m (scenes), n = {n}" for n in (4, 8)}


def test_sets_of_prompts_and_weights_are_told_apart() -> None:
    ours, long = run("h2o", 0.1, 1, 8, PASSKEY), run("h2o", 0.1, 1, 8, PASSKEY | {"context": 2048})
    older = run("h2o", 0.2, 1, 8, {"_target_": PASSKEY["_target_"], "context": 512, "download": True})
    other = replace(ours, provenance={"weights_sha256": "0123456789abcdef"})
    found = group_conditions([ours, long, older, other, run("h2o", 0.1, 1, 4, PASSKEY)])
    assert {name: len(own) for name, own in found.items()} == {
        "m (passkey), n = 4": 1,
        "m (passkey), n = 8, prompts.context = 2048, weights = -": 1,
        "m (passkey), n = 8, prompts.context = 512, weights = -": 2,
        "m (passkey), n = 8, prompts.context = 512, weights = 01234567": 1,
    }
    assert len({find_group(one) for one in (ours, long, other)}) == 3
    changed = replace(long, config={**long.config, "method": {"kernel": 2}})
    assert find_ablations([ours, changed]) == []
    assert len(find_ablations([long, changed])) == 1


def test_tables_say_n_where_it_differs() -> None:
    table = published.find("heatkv_table1")
    for runs, shown in (([*SWEEP, *FEW], True), (SWEEP, False)):
        assert (" & n & " in write_latex(list_sections(runs))) == shown
        assert (" n " in printed(80, show_runs, runs).splitlines()[3]) == shown
        assert ("n" in comparison.make_rows(table, runs)[0]) == shown
        assert ("measured: m, scenes, n = 96, 16" in comparison.make_title(table, runs)) == shown
