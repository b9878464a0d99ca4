"""Simulated races and tables of races, on values and files of which the answer is known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.race_table import describe
from benchmarks.races import Hold, draw_failing, draw_normal, hold_race, hold_tests, read_values

RACE = {
    "title": "tiny, budget 0.1, psnr", "rules": {"margin": 0.5, "higher": True}, "entrants": ["a", "b", "c"],
    "looks": [{"after": 16, "means": {"a": 2, "b": 1}}, {"after": 32, "means": {"b": 3}}],
    "drawn": 80, "grid": 300, "calibrated": {"b": 10}, "state": "won",
}  # fmt: skip
"""The record that `task=choose` writes of a race."""


def write_run(
    folder: Path,
    name: str,
    budget: float,
    values: list[float | None],
    reference: bool = True,
    first: int = 0,
    seed: int = 0,
) -> None:
    run = folder / name
    (run / "metrics").mkdir(parents=True)
    config = {"budget": budget, "prompts": {"seed": seed}}
    record = {"run": name, "reference": "full-0" if reference else None, "config": config}
    (run / "results.json").write_text(json.dumps(record))
    score = {
        "value": 1.0, "n": len(values), "sd": None, "se": None, "ci95": None, "ci": None, "bias": None,
        "replicates": None, "better": "higher", "unit": "dB", "digits": 2, "detail": False, "strata": None,
    }  # fmt: skip
    head = {"evaluator": "psnr", "protocol": "uint8", "scores": {"psnr": score}}
    (run / "metrics/psnr-uint8.json").write_text(json.dumps(head))
    lines = [json.dumps({"index": index, "psnr": value}) for index, value in enumerate(values, first)]
    (run / "metrics/psnr-uint8.samples.jsonl").write_text("\n".join(lines))


def test_values_are_read_by_budget(tmp_path: Path) -> None:
    write_run(tmp_path, "full-0", 0.1, [None, None], reference=False)
    write_run(tmp_path, "a-1", 0.1, [30.0, None])
    write_run(tmp_path, "b-1", 0.1, [31.0, 32.0])
    write_run(tmp_path, "a-2", 0.2, [33.0, 34.0])
    found = read_values(tmp_path, "psnr")
    assert {budget: set(values) for budget, values in found.items()} == {"0.1": {"a-1", "b-1"}}
    assert found["0.1"]["a-1"].tolist() == [30.0, 100.0]
    with pytest.raises(ValueError, match="needs two or more runs at one budget with lpips"):
        read_values(tmp_path, "lpips")


@pytest.mark.parametrize("other", [{"values": [31.0]}, {"first": 1}, {"seed": 1}], ids=str)
def test_values_of_other_prompts_are_refused(other: dict[str, Any], tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", 0.1, [30.0, 33.0])
    write_run(tmp_path, "b-1", 0.1, **{"values": [31.0, 32.0], **other})
    with pytest.raises(ValueError, match="same prompts"):
        read_values(tmp_path, "psnr")


@pytest.mark.parametrize("hold", [hold_race, hold_tests])
def test_both_rules_keep_a_far_better_method_even_a_later_one_and_count_what_is_drawn(hold: Hold) -> None:
    values = draw_normal((5.0, 0.0, 0.0, 0.0))(np.random.default_rng(0), 64)
    assert hold(values, 16, None) == (False, 0.25, True)
    assert hold(draw_normal((0.0, 5.0))(np.random.default_rng(0), 32), 16, None)[0]


def test_a_rival_that_has_not_failed_yet_drops_the_better_method_but_for_bounded_intervals() -> None:
    """No failure in 16 prompts has a probability of 0.97^16 = 0.61; 0.05 is the error of a race."""
    draws = [draw_failing(1)(np.random.default_rng(seed), 64) for seed in range(200)]
    assert np.mean([hold_race(values, 16)[0] for values in draws]) == pytest.approx(0.97**16, abs=0.1)
    assert not any(hold_race(values, 16, (0.0, 100.0))[0] for values in draws)


def test_a_race_is_described_beside_a_full_table() -> None:
    table = [
        {"method": "a", "budget": "0.1", "psnr ↑": "**30.1 [29, 31]**"},
        {"method": "b", "budget": "0.2", "psnr ↑": "39 [29, 31]"},
        {"method": "other", "budget": "0.1", "psnr ↑": "50 [29, 31]"},
    ]
    assert describe(RACE, [table]) == (
        "tiny, budget 0.1, psnr", "0.5", "3", "2 after 16, 1 after 32", "`b`", "32", "90", "0.290", "`a` 30.1",
    )  # fmt: skip
    by_budget = [{"method": "b", "0.1": "7 [6, 8]"}, {"method": "c", "0.1": "3 [2, 4]"}]
    assert describe({**RACE, "rules": {"margin": 0, "higher": False}}, [by_budget])[-1] == "`c` 3"
