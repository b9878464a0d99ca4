"""Tables of budgets in bytes: units are never mixed silently, and what was needed at once stands beside the peak."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.eval.protocol.scores import Metric
from kvbench.report import differences
from kvbench.report.ablations import find_ablations, name_ablation
from kvbench.report.document import find_group
from kvbench.report.figures.plots import draw_metrics, trace_curves
from kvbench.report.papers import published
from kvbench.report.runs_table import make_rows, name_methods
from kvbench.report.tables import find_best
from kvbench.runs.record.results import Results
from tests.support.published_rows import rows_of
from tests.support.results import FULL_BYTES, PSNR, hold, made_up


def run(method: str, budget: float, psnr: float, dtype: str = "float16", *, unit: str = "tokens") -> Results:
    config = {"model": {"name": "m"}, "method": {"sinks": 1}, "cache_dtype": dtype}
    one = made_up(method, budget, {"psnr": replace(PSNR, value=psnr, n=96)}, config=config)
    return hold(one, budget, dtype, unit)


FULL = run("full", 1, 99.0)
TOKENS = [run("heatkv", 0.1, 30.0), run("swa", 0.1, 25.0)]
BYTES = [run("heatkv", 0.1, 29.0, unit="bytes"), run("swa", 0.1, 24.0, unit="bytes")]


def test_the_best_of_a_budget_is_that_of_its_unit() -> None:
    runs = [*BYTES, *TOKENS]
    assert find_best(make_rows(runs), [find_group(one) for one in runs]) == {(0, "psnr"), (2, "psnr")}


def test_differences_are_those_of_one_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs: list[tuple[str, str]] = []

    def compare(mine: Results, theirs: Results, runs_dir: Path) -> dict[str, Metric]:
        pairs.append((mine.run, theirs.run))
        return {"psnr": PSNR}

    monkeypatch.setattr(differences, "compare_seeds", compare)
    differences.make_difference_rows([*BYTES, *TOKENS, run("random", 0.2, 20.0)], tmp_path, "swa")
    assert pairs == [(BYTES[0].run, BYTES[1].run), (TOKENS[0].run, TOKENS[1].run)]


def test_papers_rows_are_no_budgets_in_bytes() -> None:
    table = published.find("heatkv_table1")
    [where] = [
        where for where in table.rows() if where["method"] == ("heatkv",) and where["budget"] == ("0.1",)
    ]

    def fits(one: Results) -> bool:
        config = {**one.config, "model": {"name": "infinity_2b"}, "prompts": {"_target_": "Coco5k"}}
        return where in rows_of(table, replace(one, config=config))

    assert fits(TOKENS[0])
    assert not fits(BYTES[0])


def test_figures_have_one_unit() -> None:
    runs = [run("heatkv", budget, 30.0 + budget, "int4") for budget in (0.1, 0.2)] + [
        run("swa", budget, 30.0, unit="bytes") for budget in (0.1, 0.2)
    ]
    assert [point.memory for point in trace_curves(runs, "psnr")["heatkv int4"]] == [
        99 * 16 / FULL_BYTES,
        198 * 16 / FULL_BYTES,
    ]
    [figure] = draw_metrics(runs, "title")
    assert figure.axes[0].get_xlabel() == "measured memory, peak % of the full cache in 16 bits"
    assert [point.memory for point in trace_curves(runs[:1] + TOKENS[:1], "psnr")["heatkv float16"]] == [
        99 * 64 / FULL_BYTES
    ]


def test_methods_are_named_with_the_dtype_where_it_differs() -> None:
    runs = [FULL, run("full", 1, 40.0, "int4"), run("heatkv", 0.1, 30.0, "auto")]
    assert name_methods(runs) == ["full float16", "full int4", "heatkv"]
    assert name_methods(TOKENS) == ["heatkv", "swa"]


def test_the_dtype_is_a_setting_of_an_ablation() -> None:
    runs = [run("heatkv", 0.1, 30.0, dtype, unit="bytes") for dtype in ("float16", "int4")]
    [ablation] = find_ablations([*runs, TOKENS[0]])
    assert ablation.setting == "cache_dtype"
    assert "heatkv at 10 % of the full cache's bytes (" in name_ablation(ablation)
