"""Hard-KV's tables: what was typed in, budgets that belong to their rows, and runs that find them."""

from dataclasses import replace
from itertools import chain

import hydra
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.methods.hardkv.method import HardKV
from kvbench.report.papers import published
from kvbench.runs.record.results import Results
from tests.support.places import ROOT
from tests.support.published_rows import rows_of
from tests.support.results import made_up

CHOICES = sorted(path.stem for path in (ROOT / "conf" / "method" / "hard_kv").glob("*.yaml"))
TOKENS = 33152
"""Tokens per head that a Qwen3 caches at most: 512 of a prompt and 32768 less the last chunk of 128."""


def run(
    method: str, budget: float, model: str = "qwen3_8b", prompts: str = "Aime24", **more: object
) -> Results:
    """A run of a choice of `method=`, whose name may be `hard_kv/<selector>_<what>`."""
    settings = {}
    if "/" in method:
        with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
            settings = OmegaConf.to_container(hydra.compose("config", overrides=[f"method={method}"]).method)
    config = {
        "model": {"name": model},
        "prompts": {"_target_": f"kvbench.prompts.problems.{prompts}"},
        "method": settings,
        "cuda_graph": False,
    }
    return made_up(method, budget, {}, config={**config, **more})


def find_cells(table: str, one: Results, label: str) -> list[dict[str, str | None]]:
    return [
        dict(row.cells)
        for row in published.find(table).models[label]
        if row.where in rows_of(published.find(table), one)
    ]


PRINTED = """
1 | qwen3_8b (aime24) | full | 1 | | 0.799 13735.7
1 | qwen3_8b (aime24) | hard_kv/vanilla_top_k | 1024 | | 0.100 32161.0
1 | qwen3_8b (aime25) | hard_kv/rkv_calibrated | 4096 | | 0.567 28231.6
1 | qwen3_8b (umath) | hard_kv/snapkv_calibrated | 2048 | | 0.462 22499.4
2 | qwen3_8b (aime25) | hard_kv/snapkv_calibrated | 4096 | 0.8 | 0.533 24229.6
2 | qwen3_8b (umath) | hard_kv/rkv_top_k | 4096 | | 0.399 27429.7
3 | qwen3_8b (aime24, upper block) | hard_kv/snapkv_top_p | 4096 | | 0.433 30.7 301
3 | qwen3_8b (umath, lower block) | hard_kv/vanilla_calibrated | 4096 | | 0.401 82.0 887
4 | qwen3_4b (aime25) | hard_kv/snapkv_top_k | 4096 | | 0.433 23654.5
5 | qwen3_4b (aime24) | hard_kv/snapkv_calibrated | 4096 | 0.9 | 0.667 21796.8
6 | qwen3_32b (umath) | hard_kv/rkv_calibrated | 3000 | | 0.520 10123.0
"""
"""Rows as the paper prints them: table, model, method, budget in tokens or 1, p where it is set, cells."""


def settings_of(one: Results) -> dict[str, object]:
    method = one.config["method"]
    assert isinstance(method, dict)
    return method


@pytest.mark.parametrize("line", PRINTED.strip().splitlines())
def test_a_run_finds_what_was_printed(line: str) -> None:
    table, label, method, tokens, p, cells = (part.strip() for part in line.split("|"))
    budget = 1 if tokens == "1" else int(tokens) / TOKENS
    one = run(method, budget, published.model_of(label))
    settings = settings_of(one) | ({"p": float(p)} if p else {})
    one = made_up(method, budget, {}, config={**one.config, "method": settings})
    found = find_cells(f"hard_kv_table{table}", one, label)
    assert [list(row.values()) for row in found] == [cells.split()]


def test_every_number_was_typed() -> None:
    """Six rows of three budgets and a full cache; three selectors at three p and their base; blocks of 3 and 4 rows."""
    for number, rows in ((1, 19), (2, 12), (3, 7), (4, 19), (5, 12), (6, 7)):
        table = published.find(f"hard_kv_table{number}")
        with_numbers = [
            [row for row in found if any(cell is not None for cell in row.cells.values())]
            for found in table.models.values()
        ]
        assert [len(found) for found in with_numbers] == [rows] * (6 if number == 3 else 3)
        if number != 3:
            assert all(cell is not None for row in chain(*with_numbers) for cell in row.cells.values())


def test_tables_2_and_5_are_of_the_largest_budget() -> None:
    """Their Base and their p of 0.9 are printed twice; Table 5 differs in a length and in one cell's both numbers."""
    different = []
    for all_budgets, one_budget, model in ((1, 2, "qwen3_8b"), (4, 5, "qwen3_4b")):
        for prompts in ("aime24", "aime25", "umath"):
            label = f"{model} ({prompts})"
            known = {
                (row.where["method.selector"], row.where["method.select"]): row.cells
                for row in published.find(f"hard_kv_table{all_budgets}").models[label]
                if row.where.get("budget") == ("4096",)
            }
            for row in published.find(f"hard_kv_table{one_budget}").models[label]:
                if row.where.get("method.p", ("0.9",)) == ("0.9",):
                    before = known[row.where["method.selector"], row.where["method.select"]]
                    different += [
                        (one_budget, prompts, before[metric], row.cells[metric])
                        for metric in before
                        if before[metric] != row.cells[metric]
                    ]
    assert different == [
        (5, "aime24", "18706.9", "18709.9"), (5, "aime24", "0.554", "0.667"), (5, "aime24", "20931.6", "21796.8"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", published.find("hard_kv_table1").budgets)
def test_budgets_are_tokens_per_head(name: str) -> None:
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        spec = instantiate(hydra.compose("config", overrides=[f"model={name}"]).model).spec
    tokens = (100, 200, 400) if name == "reasoner_tiny" else (1024, 2048, 4096)
    shares = published.find("hard_kv_table1").budgets[name]
    assert list(shares) == ["1024", "2048", "4096"]
    for share, count in zip(shares.values(), tokens, strict=True):
        assert float(share) == pytest.approx(count / spec.cached_length, abs=6e-6)


def test_a_recorded_step_is_a_row_of_its_own() -> None:
    for told, expected in (("on", "477"), ("off: device=cpu has no CUDA graphs", "346")):
        one = replace(run("full", 1, cuda_graph="auto"), provenance={"cuda_graph": told})
        [cells] = find_cells("hard_kv_table3", one, "qwen3_8b (aime24, upper block)")
        assert cells["tokens/s"] == expected


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_are_selectors_with_one_way_to_select(choice: str) -> None:
    selector, way = choice.split("_", 1)
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=["model=reasoner_tiny", f"method=hard_kv/{choice}"])
    ways = {"top_k": ("top_k", "none"), "top_p": ("top_p", "none"), "calibrated": ("top_p", "bisection")}
    select, calibration = ways[way]
    plain = HardKV(selector=selector, select=select, calibration=calibration)  # type: ignore[arg-type]
    assert instantiate(cfg.method) == plain
    assert len(CHOICES) == 9


@pytest.mark.parametrize(("same", "as_table"), [(4, 1), (5, 2)])
def test_tables_of_a_smaller_model_are_the_same_runs_here(same: int, as_table: int) -> None:
    files = [
        OmegaConf.load(ROOT / "conf" / "sweeps" / f"hard_kv_table{number}.yaml")
        for number in (same, as_table)
    ]
    assert files[0].hydra == files[1].hydra
    assert files[0].defaults == files[1].defaults
