"""Runs of equal settings and other code are rows of their own, and tables note uncommitted changes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.code_notes import describe_digests, keep_newest, list_made, name_code
from kvbench.report.runs_table import make_rows
from kvbench.report.seeds import combine_seeds, group_seeds
from kvbench.runs.code import identify_engine, read_class
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, made_up


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
