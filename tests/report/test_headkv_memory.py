"""HeadKV's tables: budgets that belong to their rows, and what of Table 4's memory follows from shapes."""

from fractions import Fraction

import hydra
import pytest
from hydra.utils import instantiate

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.report.papers import headkv_memory, memory, published
from tests.support.published_rows import rows_of
from tests.support.results import made_up

XL = ModelSpec("llamagen_xl", 36, 20, 64, next_token(1, [24] * 23 + [23]))


@pytest.mark.parametrize(("tokens", "row"), [(145, "1/4"), (97, "1/6"), (73, "1/8")])
def test_budgets_are_image_tokens_and_the_class(tokens: int, row: str) -> None:
    """1/4, 1/6 and 1/8 of 576, and one more, of the tokens that are cached before the last row."""
    config = {"model": {"name": XL.name}}
    run = made_up("headkv", float(Budget.parse(tokens, XL).fraction), {}, tokens=553, config=config)
    for name in ("headkv_table2", "headkv_table3", "headkv_table4"):
        table = published.find(name)
        printed = {where["budget"][0] for where in table.rows()}
        found = [where["budget"] for where in rows_of(table, run)]
        assert found == [(row,)] * (row in printed)
    [less] = [one for one in published.find("headkv_table2").models[XL.name] if one.where == {
        "method": ("headkv",), "budget": (row,)
    }]  # fmt: skip
    assert headkv_memory.image_tokens(XL, less) == tokens - 1


@pytest.mark.parametrize("name", published.find("headkv_table1").budgets)
def test_budgets_of_every_model_follow_from_its_shapes(name: str) -> None:
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        spec = instantiate(hydra.compose("config", overrides=[f"model={name}"]).model).spec
    for share, printed in published.find("headkv_table1").budgets[name].items():
        tokens = int(Fraction(share) * spec.drawn_tokens) + spec.lengths[0]
        assert float(printed) == pytest.approx(tokens / spec.cached_length, abs=5e-5)


def test_shapes_give_what_another_budget_saves() -> None:
    figures = {figure.row: figure for figure in memory.TABLES["headkv_table4"]({XL.name: XL})}
    # A token is 128 prompts x 2 branches x 36 layers x 20 heads x 64 channels x 2 x 2 bytes.
    assert headkv_memory.token_gb(XL) == 128 * 2 * 36 * 20 * 64 * 4 / 1e9
    reproduced = {what: figure.computed for what, figure in figures.items() if figure.verdict == "reproduced"}
    assert reproduced == {
        "linear_ar, 144 tokens to 96": "2.265 GB",
        "linear_ar, 144 tokens, saving": "56.119 %",
        "headkv, 144 tokens, saving": "56.856 %",
        "linear_ar, 96 tokens, saving": "62.784 %",
        "headkv, 96 tokens, saving": "63.610 %",
    }
    assert figures["full"].computed == "cache 27.18 GB"
    assert figures["linear_ar, 144 tokens, saved"].printed == "33.91 - 14.88 = 19.03 GB"
    assert figures["linear_ar, 144 tokens, saved"].computed == "20.38 GB"
    assert "18.98 GiB" in figures["linear_ar, 144 tokens, saved"].how
    shares = [figures[f"{tokens} tokens, headkv below linear_ar"].computed for tokens in (144, 96)]
    assert shares == ["5.5 % local heads", "12.4 % local heads"]
    assert len(figures) == 13
    assert headkv_memory.headkv_table4({}) == []


def test_other_models_count_their_own_batch_and_rows() -> None:
    janus = ModelSpec("janus_pro_7b", 30, 32, 128, next_token(64, [24] * 23 + [23]))
    lumina = ModelSpec("lumina_mgpt_7b_768", 32, 32, 128, next_token(64, [49] * 47 + [48]))
    found = memory.TABLES["headkv_table4"]({one.name: one for one in (janus, lumina)})
    figures = {(figure.model, figure.row): figure for figure in found}
    assert headkv_memory.token_gb(janus) == 55 * 2 * 30 * 32 * 128 * 4 / 1e9
    assert headkv_memory.token_gb(lumina) == 6 * 2 * 32 * 32 * 128 * 4 / 1e9
    savings = {what: figure for what, figure in figures.items() if what[1].endswith("saving")}
    assert len(savings) == 6
    assert {figure.verdict for figure in savings.values()} == {"reproduced"}
    # 24 tokens of 110 sequences are 1.30 GB; the paper's program gained 1.37 by them.
    step = figures[janus.name, "linear_ar, 96 tokens to 72"]
    assert (step.printed, step.computed, step.verdict) == ("1.37 GB", "1.298 GB", "not derivable")
    # A local head keeps two rows: 48 of Janus's tokens, 98 of Lumina's.
    assert figures[lumina.name, "294 tokens, headkv below linear_ar"].computed == "8.1 % local heads"
    assert figures[janus.name, "72 tokens, headkv below linear_ar"].computed == "16.2 % local heads"
