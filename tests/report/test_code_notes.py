"""Runs of equal settings and other code are rows of their own, and tables note uncommitted changes."""

from pathlib import Path

from kvbench.report.code_notes import describe_digests, name_code
from kvbench.report.runs_table import make_rows
from kvbench.report.seeds import combine_seeds, group_seeds
from kvbench.runs.code import identify_engine
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, made_up


def make_run(seed: int, *, sha256: str = "", revision: int = 1, changes: str = "", **made: str) -> Results:
    known = {
        **made,
        "classes": {
            "method": {"x.Snap": {"revision": revision, "sha256": sha256 or "0", "pinned": not sha256}},
            "model": {"y.Tiny": {"revision": 0, "sha256": "1", "pinned": True}},
        },
        "code": {"commit": "5", "diff_sha256": changes},
    }
    config = {"model": {"name": "m"}, "method": {"sinks": 1}, "seed": seed}
    return made_up(
        "snapkv", 0.1, {"psnr": PSNR}, config=config, provenance=known, run=f"snapkv-{seed}-{sha256}"
    )


def test_runs_of_other_code_are_not_joined_and_have_a_column(tmp_path: Path) -> None:
    plain, edited = make_run(0), make_run(1, sha256="abcdef0123456789")
    assert group_seeds([plain, edited]) == [[plain], [edited]]
    assert group_seeds([plain, make_run(1)]) == [[plain, make_run(1)]]
    assert combine_seeds([plain, edited], tmp_path) == [plain, edited]
    assert [name_code(run) for run in (plain, edited)] == ["revision 1", "abcdef01"]
    assert [row["code"] for row in make_rows([plain, edited])] == ["revision 1", "abcdef01"]
    assert "code" not in make_rows([plain, make_run(1)])[0]
    assert len(group_seeds([plain, make_run(1, revision=2)])) == 2
    assert name_code(made_up("snapkv", 0.1, {})) == "-"


def test_another_engine_is_no_seed_and_has_a_column_and_a_note() -> None:
    ours, before = make_run(0, engine_sha256=identify_engine()), make_run(1, engine_sha256="0123456789")
    assert group_seeds([ours, before]) == [[ours], [before]]
    assert [row["engine"] for row in make_rows([ours, before])] == [identify_engine()[:8], "01234567"]
    assert describe_digests([ours, before]).startswith("1 of 2 runs: made by another engine")
    assert "engine" not in make_rows([ours])[0]
    assert describe_digests([ours]) == ""


def test_calibrations_of_one_name_with_other_numbers_have_a_column() -> None:
    runs = [make_run(seed, calibration="calibration-1", calibration_sha256=str(seed) * 64) for seed in (0, 1)]
    assert [row["calibration"] for row in make_rows(runs)] == ["00000000", "11111111"]
    assert "calibration" not in make_rows([runs[0], make_run(1, calibration="calibration-2")])[0]
