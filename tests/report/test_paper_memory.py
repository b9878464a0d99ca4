"""The papers' memory columns: which follow from shapes, and under which reading; formulas against sums by hand."""

from dataclasses import astuple

import pytest

from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.report.papers import memory
from kvbench.report.papers.printed import prints_as, rounding_interval
from tests.support.published import INFINITY
from tests.support.texts import check_text


def square(name: str, layers: int, heads: int, head_dim: int, *sides: int) -> ModelSpec:
    return ModelSpec(name, layers, heads, head_dim, next_scale([(side, side) for side in sides]))


VAR = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
XL = ModelSpec("llamagen_xl", 36, 20, 64, next_token(1, [24] * 23 + [23]))
SPECS = {
    spec.name: spec
    for spec in (
        *INFINITY.values(),
        square("var_d24", 24, 24, 64, *VAR),
        square("var_d30", 30, 30, 64, *VAR),
        square("var_d36", 36, 36, 64, 1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
        XL,
        ModelSpec("janus_pro_7b", 30, 32, 128, next_token(64, [24] * 23 + [23])),
        ModelSpec("lumina_mgpt_7b_768", 32, 32, 128, next_token(64, [49] * 47 + [48])),
    )
}


@pytest.mark.parametrize("name", memory.TABLES)
def test_what_is_printed_and_what_follows_from_shapes(name: str) -> None:
    """The golden text has both, whether they agree to the printed digit, and what was counted."""
    figures = memory.TABLES[name](SPECS)
    check_text(f"{name}.txt", "".join(" | ".join(astuple(one)) + "\n" for one in figures))


def test_operations_and_tokens_by_hand() -> None:
    """A token of LlamaGen XL: 128 prompts x 2 branches x 36 layers x 20 heads x 64 channels x 2 x 2 bytes."""
    spec = ModelSpec("small", 2, 3, 8, next_scale([(1, 1), (2, 2), (3, 3)]))
    each = 4 * 2 * 2 * 3 * 8 / 1e12  # operations, branches, layers, heads, channels
    assert memory.count_tera(spec, 1, None, None) == pytest.approx(each * (1 * 1 + 4 * 5 + 9 * 14))
    assert memory.count_tera(spec, 5, 2, None) == pytest.approx(5 * each * (1 * 1 + 4 * 5 + 9 * 11))
    assert memory.count_tera(spec, 1, None, 6) == pytest.approx(each * (1 * 1 + 4 * 5 + 9 * 6))
    assert memory.count_tera(spec, 1, 2, 10) == pytest.approx(each * (1 * 1 + 4 * 5 + 9 * 10))
    assert memory.token_gb(XL) == 128 * 2 * 36 * 20 * 64 * 4 / 1e9


@pytest.mark.parametrize(
    ("value", "text", "way"),
    [
        (53.156, "53.15", "cut off"), (28.6875, "28.69", "rounded"), (17062.5, "17062", "cut off"),
        (17062.5, "17063", "rounded"), (22.41, "22.41", "rounded"), (22.42, "22.41", None),
    ],
)  # fmt: skip
def test_how_a_number_was_printed(value: float, text: str, way: str | None) -> None:
    assert prints_as(value, text) == way
    low, high = rounding_interval(text)
    assert (low <= value < high) == (way is not None)
