"""The papers' memory columns: which follow from shapes, and under which reading."""

import pytest

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.ams_kv import effective_capacities
from kvbench.report.papers import memory
from kvbench.report.papers.memory import implied_layers, thousands
from kvbench.report.papers.printed import PrintedFigure, prints_as, rounding_interval


def square(name: str, layers: int, heads: int, head_dim: int, *sides: int) -> ModelSpec:
    return ModelSpec(name, layers, heads, head_dim, next_scale([(side, side) for side in sides]))


INFINITY = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
SPECS = {
    "infinity_2b": square("infinity_2b", 32, 16, 128, *INFINITY),
    "infinity_8b": square("infinity_8b", 40, 28, 128, *INFINITY),
    "var_d30": square("var_d30", 30, 30, 64, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    "var_d36": square("var_d36", 36, 36, 64, 1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
}


def verdicts(table: str) -> list[tuple[str, str, str]]:
    return [(figure.model, figure.printed, figure.verdict) for figure in memory.TABLES[table](SPECS)]


def test_heatkv_table_1_follows_from_shapes() -> None:
    assert verdicts("heatkv_table1") == [
        (model, f"{mib} MiB", "reproduced")
        for model, column in (
            ("infinity_2b", (38550, 7800, 3900, 1590)),
            ("infinity_8b", (84328, 17062, 8531, 3478)),
        )
        for mib in column
    ]


def test_full_caches_of_ams_kv_follow_from_shapes_and_compressed_ones_do_not() -> None:
    full = [("var_d30", "22.41 x 1000 MiB"), ("var_d36", "53.15 x 1000 MiB")]
    found = verdicts("ams_kv_table3")
    assert [(model, printed) for model, printed, verdict in found if verdict == "reproduced"] == full
    assert [printed.split()[0] for _, printed, verdict in found if verdict == "not derivable"] == [
        "4.77", "78.72", "15.26", "71.29", "OOM", "30.52",
    ]  # fmt: skip
    assert [printed for _, printed, verdict in found if verdict == "under one reading"] == [
        "15.26 x 1000 MiB"
    ]
    sixth = verdicts("ams_kv_table6")
    assert [printed.split()[0] for _, printed, v in sixth if v == "reproduced"] == ["7.17", "14.34", "28.69"]
    assert [printed for _, printed, v in sixth if v == "no number printed"] == ["OOM", "OOM"]
    assert len([1 for *_, v in sixth if v == "not derivable"]) == 5


def layers(spec: ModelSpec, batch: int, printed: str) -> tuple[float, float]:
    low, high = (bound / thousands(1, spec, batch) for bound in rounding_interval(printed))
    return implied_layers(low, spec, effective_capacities(spec, 2)), implied_layers(
        high, spec, effective_capacities(spec, 2)
    )


@pytest.mark.parametrize(
    ("model", "batch", "printed", "near"),
    [
        ("var_d30", 50, "4.77", 7.05),
        ("var_d36", 25, "15.26", 19.63),
        ("var_d30", 16, "2.81", 28.64),
        ("var_d30", 32, "5.62", 28.64),
        ("var_d30", 64, "11.23", 28.64),
        ("var_d30", 128, "22.47", 28.64),
        ("var_d30", 256, "44.94", 28.64),
    ],
)
def test_compressed_caches_need_broken_layers(model: str, batch: int, printed: str, near: float) -> None:
    low, high = layers(SPECS[model], batch, printed)
    assert low - 0.01 <= near <= high + 0.01
    assert int(low) == int(high)


def test_capacities_are_the_last_scales_that_are_read() -> None:
    found = {name: effective_capacities(spec, 2) for name, spec in SPECS.items()}
    assert found == {
        "infinity_2b": (1605, 3909), "infinity_8b": (1605, 3909), "var_d30": (105, 274), "var_d36": (329, 905),
    }  # fmt: skip


def test_figures_of_the_text_and_the_factor_of_equation_4() -> None:
    figures = {(figure.model, figure.row): figure for figure in memory.ams_kv_eq4(SPECS)}

    def figure(model: str, what: str) -> PrintedFigure:
        return figures[model, what]

    assert figure("var_d30", "full cache, batch 50, factor 16").computed == "29.883 x 1000 MiB"
    assert figure("var_d30", "full cache, batch 50, factor 16").verdict == "not derivable"
    assert figure("var_d30", "full cache, batch 50, factor 12").verdict == "reproduced"
    assert figure("var_d36", "full cache, batch 25, factor 12").verdict == "reproduced"
    assert figure("var_d30", "abstract, saving").computed == "84.828 %"
    assert figure("var_d30", "abstract, saving").verdict == "under one reading"
    assert figure("infinity_2b", "memory saved").computed == "10.107 GiB"
    assert figure("infinity_2b", "memory saved, share").computed == "35.92 %"
    assert figure("infinity_2b", "memory saved, share").verdict == "not derivable"


def test_a_model_that_is_not_there_is_left_out() -> None:
    assert {figure.model for figure in memory.ams_kv_eq4({"var_d30": SPECS["var_d30"]})} == {"var_d30"}
    assert memory.ams_kv_table3({}) == []
    assert memory.models("ams_kv_eq4") == ("var_d30", "var_d36", "infinity_2b")


@pytest.mark.parametrize(
    ("value", "text", "way"),
    [
        (53.156, "53.15", "cut off"),
        (28.6875, "28.69", "rounded"),
        (17062.5, "17062", "cut off"),
        (17062.5, "17063", "rounded"),
        (22.41, "22.41", "rounded"),
        (22.42, "22.41", None),
    ],
)
def test_how_a_number_was_printed(value: float, text: str, way: str | None) -> None:
    assert prints_as(value, text) == way
    low, high = rounding_interval(text)
    assert (low <= value < high) == (way is not None)
