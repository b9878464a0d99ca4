"""Hard-KV's tables: what was typed in, budgets that belong to their rows, and runs that find them."""

import re
from dataclasses import replace
from itertools import chain

import hydra
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.methods.hardkv.method import HardKV
from kvbench.report.papers import published
from kvbench.runs.record.results import Results
from tests.report.test_published_comparison import parse_run
from tests.support.places import ROOT
from tests.support.published_rows import rows_of

CHOICES = sorted(path.stem for path in (ROOT / "conf" / "method" / "hard_kv").glob("*.yaml"))
PRINTED = """
1 | qwen3_8b (aime24) | full 1 qwen3_8b AIME24 | 0.799 13735.7
1 | qwen3_8b (aime24) | hard_kv 1024/33152 qwen3_8b AIME24 vanilla top_k none | 0.100 32161.0
1 | qwen3_8b (aime25) | hard_kv 4096/33152 qwen3_8b AIME25 rkv top_p bisection | 0.567 28231.6
1 | qwen3_8b (umath) | hard_kv 2048/33152 qwen3_8b UMATH snapkv top_p bisection | 0.462 22499.4
2 | qwen3_8b (aime25) | hard_kv 4096/33152 qwen3_8b AIME25 snapkv top_p bisection method.p=0.8 | 0.533 24229.6
2 | qwen3_8b (umath) | hard_kv 4096/33152 qwen3_8b UMATH rkv top_k none | 0.399 27429.7
3 | qwen3_8b (aime24, upper block) | hard_kv 4096/33152 qwen3_8b AIME24 snapkv top_p none | 0.433 30.7 301
3 | qwen3_8b (umath, lower block) | hard_kv 4096/33152 qwen3_8b UMATH vanilla top_p bisection | 0.401 82.0 887
4 | qwen3_4b (aime25) | hard_kv 4096/33152 qwen3_4b AIME25 snapkv top_k none | 0.433 23654.5
5 | qwen3_4b (aime24) | hard_kv 4096/33152 qwen3_4b AIME24 snapkv top_p bisection method.p=0.9 | 0.667 21796.8
6 | qwen3_32b (umath) | hard_kv 3000/33152 qwen3_32b UMATH rkv top_p bisection | 0.520 10123.0
"""
"""Rows as the paper prints them: table, model, a run with its selector, selection and calibration, cells.

A Qwen3 caches at most 33152 tokens per head: 512 of a prompt and 32768 less the last chunk of 128.
"""
SETTINGS = r"(vanilla|snapkv|rkv) (top_k|top_p) (none|bisection)"


def find_cells(name: str, label: str, one: Results) -> list[list[str | None]]:
    table = published.find(name)
    return [[*row.cells.values()] for row in table.models[label] if row.where in rows_of(table, one)]


@pytest.mark.parametrize("line", PRINTED.strip().splitlines())
def test_a_run_finds_what_was_printed(line: str) -> None:
    table, label, words, cells = line.split(" | ")
    settings = r"method.selector=\1 method.select=\2 method.calibration=\3 cuda_graph=false"
    one = parse_run(re.sub(SETTINGS, settings, words))
    assert find_cells(f"hard_kv_table{table}", label, one) == [cells.split()]


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
        one = replace(parse_run("full 1 qwen3_8b AIME24 cuda_graph=auto"), provenance={"cuda_graph": told})
        [[*_, speed]] = find_cells("hard_kv_table3", "qwen3_8b (aime24, upper block)", one)
        assert speed == expected


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
