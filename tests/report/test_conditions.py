"""Numbers of other samples, units, code or engines never stand in one curve or row, nor compete for a best value."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.report import differences
from kvbench.report.ablations import find_ablations
from kvbench.report.code_notes import describe_digests, keep_newest, list_made, name_code
from kvbench.report.conditions import describe_sinks, find_group, group_conditions, keep_one_count
from kvbench.report.runs_table import make_rows
from kvbench.report.seeds import combine_seeds, group_seeds
from kvbench.report.tables import find_best
from kvbench.runs.code import identify_engine, read_class
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, hold, made_up

SCENES = {"_target_": "kvbench.prompts.base.Scenes"}
PASSKEY = {"_target_": "kvbench.prompts.passkey.Passkey", "digits": None, "context": 512}


def run(method: str, budget: float, fid: float, n: int, prompts: Mapping[str, object] = SCENES) -> Results:
    config = {"model": {"name": "m"}, "method": {"kernel": 1}, "prompts": {**prompts, "count": n}}
    return made_up(method, budget, {"fid": Metric(fid, "lower")}, n=n, config=config)


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
    sweep = [run(method, budget, 1, 96) for method in ("h2o", "heatkv") for budget in (0.1, 0.2)]
    few = [run("h2o", 0.04, 5, 16), run("heatkv", 0.1, 90, 16)]
    smoke = run("swa", 0.1, 9, 2, PASSKEY)
    assert keep_one_count([*sweep, *few, smoke]) == [*sweep, smoke]
    assert keep_one_count([*sweep[:2], *few]) == sweep[:2]  # as many of both
    assert keep_one_count([*sweep, *few], 16) == few
    with pytest.raises(ConfigError, match=r"prompts\.count=8: .*; there are 16, 96"):
        keep_one_count([*sweep, *few], 8)


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
    others = [one("h2o", "other", sinks=0), one("swa", "other", sinks=1)]
    assert describe_sinks([*equal, *others]) == "Sinks differ. Leading scales of other: 0 (h2o), 1 (swa)."


def bounded(
    method: str, budget: float, psnr: float, dtype: str = "float16", *, unit: str = "tokens"
) -> Results:
    config = {"model": {"name": "m"}, "method": {"sinks": 1}, "cache_dtype": dtype}
    one = made_up(method, budget, {"psnr": replace(PSNR, value=psnr, n=96)}, config=config)
    return hold(one, budget, dtype, unit)


def test_runs_of_other_units_dtypes_or_noise_never_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = [bounded("heatkv", 0.1, 30.0), bounded("swa", 0.1, 25.0)]
    in_bytes = [bounded("heatkv", 0.1, 29.0, unit="bytes"), bounded("swa", 0.1, 24.0, unit="bytes")]
    pairs: list[tuple[str, str]] = []

    def compare(mine: Results, theirs: Results, runs_dir: Path) -> dict[str, Metric]:
        pairs.append((mine.run, theirs.run))
        return {"psnr": PSNR}

    monkeypatch.setattr(differences, "compare_seeds", compare)
    differences.make_difference_rows([*in_bytes, *tokens, bounded("random", 0.2, 20.0)], tmp_path, "swa")
    assert pairs == [(in_bytes[0].run, in_bytes[1].run), (tokens[0].run, tokens[1].run)]
    runs = [*in_bytes, *tokens]
    assert find_best(make_rows(runs), [find_group(one) for one in runs]) == {(0, "psnr"), (2, "psnr")}
    packed = bounded("heatkv", 0.1, 30.0, "int4", unit="bytes")
    [ablation] = find_ablations([in_bytes[0], packed, tokens[0]])
    assert ablation.setting == "cache_dtype"
    stream, counter = (
        replace(tokens[0], config={**tokens[0].config, "noise": n}) for n in ("stream", "counter")
    )
    assert find_group(stream) != find_group(counter)
    assert len(group_seeds([stream, counter])) == 2
    other = replace(counter, run="other", config={**counter.config, "method": {"sinks": 2}})
    assert find_ablations([counter, other])
    assert not find_ablations([stream, other])


def make_run(seed: int, *, sha256: str = "", revision: int = 1, **made: str) -> Results:
    known = {
        **made,
        "classes": {
            "method": {"x.Snap": {"revision": revision, "sha256": sha256 or "0", "pinned": not sha256}},
            "model": {"y.Tiny": {"revision": 0, "sha256": "1", "pinned": True}},
        },
        "code": {"commit": "5", "diff_sha256": ""},
    }
    config = {"model": {"name": "m"}, "method": {"sinks": 1}, "seed": seed}
    return made_up(
        "snapkv", 0.1, {"psnr": PSNR}, config=config, provenance=known, run=f"snapkv-{seed}-{sha256}"
    )


def test_the_newest_code_of_equal_settings_stays() -> None:
    """It has one seed of two: the others are no numbers of it. References stay with their runs."""
    old = [replace(make_run(seed, sha256="a" * 8), finished=f"2026-01-0{1 + seed}") for seed in (0, 1)]
    new = replace(make_run(0, sha256="b" * 8), finished="2026-01-03", reference="full-1")
    full = [
        replace(make_run(0, revision=one), run=f"full-{one}", method="full", reference=None)
        for one in (0, 1, 2)
    ]
    assert keep_newest([*old, new, *full]) == [new, *full[1:]]
    assert keep_newest([*old[:1], new], old[0].run) == [*old[:1], new]
    other = replace(old[0], config={**old[0].config, "method": {"sinks": 2}})
    assert keep_newest([other, new]) == [other, new]


def test_rows_say_which_is_the_code_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_snap.py"
    file.write_text("class Snap:\n    rate = 1\n")
    now = read_class(type("Snap", (), {"__module__": "own_snap"})).sha256
    runs = [
        replace(run, provenance={"classes": {"method": {"own_snap.Snap": {"sha256": sha256}}}})
        for run, sha256 in ((make_run(0), now), (make_run(1), "0123456789"))
    ]
    assert [row["code"] for row in make_rows(runs)] == [f"{now[:8]} (now)", "01234567"]
    [note] = list_made(runs)
    assert note.startswith("1 of 2 runs: made by other code")
    assert list_made(runs[:1]) == []
    ended = [replace(run, finished=f"2026-01-0{day}") for day, run in enumerate(runs, 1)]
    assert keep_newest(ended) == ended[:1]  # the edit that was undone is the newest
    assert "own_snap" not in sys.modules


def test_runs_of_other_code_engine_or_calibration_are_not_joined_and_have_a_column(tmp_path: Path) -> None:
    plain, edited = make_run(0), make_run(1, sha256="abcdef0123456789")
    assert group_seeds([plain, edited]) == [[plain], [edited]]
    assert group_seeds([plain, make_run(1)]) == [[plain, make_run(1)]]
    assert combine_seeds([plain, edited], tmp_path) == [plain, edited]
    assert [row["code"] for row in make_rows([plain, edited])] == ["revision 1", "abcdef01"]
    assert len(group_seeds([plain, make_run(1, revision=2)])) == 2
    assert name_code(made_up("snapkv", 0.1, {})) == "-"
    now = identify_engine()
    ours, before = make_run(0, engine_sha256=now), make_run(1, engine_sha256="0123456789")
    assert group_seeds([ours, before]) == [[ours], [before]]
    assert [row["engine"] for row in make_rows([ours, before])] == [now[:8], "01234567"]
    assert describe_digests([ours, before]).startswith("1 of 2 runs: made by another engine")
    assert describe_digests([ours]) == ""
    runs = [make_run(seed, calibration="calibration-1", calibration_sha256=str(seed) * 64) for seed in (0, 1)]
    assert [row["calibration"] for row in make_rows(runs)] == ["00000000", "11111111"]
    assert not {"code", "engine", "calibration"} & make_rows([ours, make_run(1)])[0].keys()
