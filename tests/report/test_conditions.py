"""Numbers of other samples or units never stand in one curve, nor compete for one best value."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.report import differences
from kvbench.report.ablations import find_ablations, name_ablation
from kvbench.report.conditions import describe_sinks, find_group, group_conditions, keep_one_count
from kvbench.report.runs_table import make_rows, name_methods
from kvbench.report.tables import find_best
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, hold, made_up

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


def test_runs_of_one_number_of_samples_stay() -> None:
    runs, smoke = [*SWEEP, *FEW], run("swa", 0.1, 9, 2, PASSKEY)
    assert keep_one_count([*runs, smoke]) == [*SWEEP, smoke]
    assert keep_one_count([*SWEEP[:2], *FEW]) == SWEEP[:2]  # as many of both
    assert keep_one_count(runs, 16) == FEW
    assert keep_one_count([]) == []
    with pytest.raises(ConfigError, match=r"prompts\.count=8: .*; there are 16, 96"):
        keep_one_count(runs, 8)


def test_sinks_that_differ_are_told() -> None:
    def one(method: str, model: str = "m", **settings: object) -> Results:
        return made_up(method, 0.1, {}, config={"model": {"name": model}, "method": settings})

    equal = [one("h2o", sinks=1, leading=0), one("swa", sinks=1), one("full")]
    assert describe_sinks(equal) == ""
    more = [*equal, one("ams_kv", condensed=2, leading=4), one("hack", sinks=0), one("hack", sinks=3)]
    assert describe_sinks(more) == (
        "Sinks differ. Leading scales: 0 (hack), 1 (h2o, swa), 2 (ams_kv), 3 (hack). First tokens: 0 (h2o), 4 (ams_kv)."
    )
    assert describe_sinks(more[-2:]) == ""  # a column has them
    others = [one("h2o", "other", sinks=0), one("keydiff", "other", sinks=0)]
    assert describe_sinks([*equal, *others]) == ""
    told = "Sinks differ. Leading scales of other: 0 (h2o, keydiff), 1 (swa)."
    assert describe_sinks([*equal, *others, one("swa", "other", sinks=1)]) == told


# Budgets in bytes: units are never mixed silently


def bounded(
    method: str, budget: float, psnr: float, dtype: str = "float16", *, unit: str = "tokens"
) -> Results:
    config = {"model": {"name": "m"}, "method": {"sinks": 1}, "cache_dtype": dtype}
    one = made_up(method, budget, {"psnr": replace(PSNR, value=psnr, n=96)}, config=config)
    return hold(one, budget, dtype, unit)


FULL = bounded("full", 1, 99.0)
TOKENS = [bounded("heatkv", 0.1, 30.0), bounded("swa", 0.1, 25.0)]
IN_BYTES = [bounded("heatkv", 0.1, 29.0, unit="bytes"), bounded("swa", 0.1, 24.0, unit="bytes")]


def test_the_best_of_a_budget_is_that_of_its_unit() -> None:
    runs = [*IN_BYTES, *TOKENS]
    assert find_best(make_rows(runs), [find_group(one) for one in runs]) == {(0, "psnr"), (2, "psnr")}


def test_differences_are_those_of_one_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs: list[tuple[str, str]] = []

    def compare(mine: Results, theirs: Results, runs_dir: Path) -> dict[str, Metric]:
        pairs.append((mine.run, theirs.run))
        return {"psnr": PSNR}

    monkeypatch.setattr(differences, "compare_seeds", compare)
    differences.make_difference_rows([*IN_BYTES, *TOKENS, bounded("random", 0.2, 20.0)], tmp_path, "swa")
    assert pairs == [(IN_BYTES[0].run, IN_BYTES[1].run), (TOKENS[0].run, TOKENS[1].run)]


def test_methods_are_named_with_the_dtype_where_it_differs() -> None:
    runs = [FULL, bounded("full", 1, 40.0, "int4"), bounded("heatkv", 0.1, 30.0, "auto")]
    assert name_methods(runs) == ["full float16", "full int4", "heatkv"]
    assert name_methods(TOKENS) == ["heatkv", "swa"]


def test_the_dtype_is_a_setting_of_an_ablation() -> None:
    runs = [bounded("heatkv", 0.1, 30.0, dtype, unit="bytes") for dtype in ("float16", "int4")]
    [ablation] = find_ablations([*runs, TOKENS[0]])
    assert ablation.setting == "cache_dtype"
    assert "heatkv at 10 % of the full cache's bytes (" in name_ablation(ablation)
