"""Memory and work in HACK++'s tables, against sums by hand and against what is printed."""

import pytest

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.models.infinity.scales import schedule
from kvbench.report.papers import memory
from kvbench.report.papers.hackpp_costs import count_gib, count_tera

VAR_SIDES = [(side, side) for side in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)]
SPECS = {
    "infinity_2b": ModelSpec("infinity_2b", 32, 16, 128, next_scale(schedule(1.0, "1M"))),
    "infinity_8b": ModelSpec("infinity_8b", 40, 28, 128, next_scale(schedule(1.0, "1M"))),
    "var_d24": ModelSpec("var_d24", 24, 24, 64, next_scale(VAR_SIDES)),
    "var_d30": ModelSpec("var_d30", 30, 30, 64, next_scale(VAR_SIDES)),
}


def test_operations_of_a_small_model_by_hand() -> None:
    spec = ModelSpec("small", 2, 3, 8, next_scale([(1, 1), (2, 2), (3, 3)]))
    each = 4 * 2 * 2 * 3 * 8 / 1e12  # operations, branches, layers, heads, channels
    assert count_tera(spec, 1, None, None) == pytest.approx(each * (1 * 1 + 4 * 5 + 9 * 14))
    assert count_tera(spec, 5, 2, None) == pytest.approx(5 * each * (1 * 1 + 4 * 5 + 9 * 11))
    assert count_tera(spec, 1, None, 6) == pytest.approx(each * (1 * 1 + 4 * 5 + 9 * 6))
    assert count_tera(spec, 1, 2, 10) == pytest.approx(each * (1 * 1 + 4 * 5 + 9 * 10))


@pytest.mark.parametrize(
    ("model", "batch", "cached", "read", "printed"),
    [
        ("infinity_2b", 1, None, None, 35.91),
        ("infinity_2b", 1, None, 3156, 15.34),
        ("infinity_2b", 1, 1052, None, 19.19),
        ("infinity_2b", 1, 105, None, 14.35),
        ("infinity_2b", 1, 105, 3156, 12.11),
        ("infinity_8b", 1, None, None, 78.54),
        ("infinity_8b", 1, None, 3156, 33.55),
        ("infinity_8b", 1, 1052, None, 41.98),
        ("infinity_8b", 1, 105, None, 31.40),
        ("infinity_8b", 1, 105, 3156, 26.50),
    ],
)
def test_printed_operations_follow_within_a_thousandth(
    model: str, batch: int, cached: int | None, read: int | None, printed: float
) -> None:
    assert count_tera(SPECS[model], batch, cached, read) == pytest.approx(printed, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "cached", "read", "uniform", "printed"),
    [
        ("infinity_2b", 1052, 3156, 14.669, 14.32),
        ("infinity_8b", 1052, 3156, 32.089, 31.53),
        ("var_d30", 204, 340, 2.731, 2.59),
        ("var_d30", 136, 204, 1.803, 1.78),
        ("var_d24", 204, 340, 1.748, 1.66),
        ("var_d24", 136, 204, 1.154, 1.14),
    ],
)
def test_uneven_budgets_cost_less(model: str, cached: int, read: int, uniform: float, printed: float) -> None:
    batch = 32 if model.startswith("var") else 1
    assert count_tera(SPECS[model], batch, cached, read) == pytest.approx(uniform, abs=6e-4)
    assert printed < uniform


@pytest.mark.parametrize(
    ("model", "batch", "printed"),
    [("infinity_2b", 1, 7.71), ("infinity_8b", 1, 16.86), ("var_d30", 32, 14.01), ("var_d24", 32, 8.96)],
)
def test_full_caches_follow(model: str, batch: int, printed: float) -> None:
    assert count_gib(1, SPECS[model], batch) == pytest.approx(printed, rel=1e-3)


def test_every_figure_but_those_of_calibrated_budgets_is_reproduced() -> None:
    figures = [figure for name in ("hackpp_table1", "hackpp_table2") for figure in memory.TABLES[name](SPECS)]
    open_ones = {(figure.model, figure.row) for figure in figures if figure.verdict == "not derivable"}
    assert open_ones == {
        *((model, "hackpp/read_30 at 0.1") for model in ("infinity_2b", "infinity_8b")),
        *(
            (model, what)
            for model in ("var_d24", "var_d30")
            for what in ("hack at 0.3", "hackpp/read_50 at 0.3", "hackpp/read_30 at 0.2")
        ),
    }
    readings = {figure.printed for figure in figures if figure.verdict == "under one reading"}
    assert readings == {"15.34 TFLOPs", "33.55 TFLOPs", "26.50 TFLOPs"}  # shares rounded up
    assert {figure.verdict for figure in figures if figure.printed.endswith("GiB")} == {"reproduced"}
    assert memory.models("hackpp_table1") == ("infinity_2b", "infinity_8b", "hart")
