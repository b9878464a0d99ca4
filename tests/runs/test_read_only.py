"""A finished run is shown in a runs_dir that cannot be written; any other is refused, and nothing changes."""

import re
import shutil
from pathlib import Path

import pytest

from kvbench.cli.config import checks
from kvbench.cli.config.checks import check_runs_dir
from kvbench.core.config import ConfigError
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.paired.ssim import Ssim
from kvbench.methods.full import Full
from kvbench.runs import execute
from kvbench.runs.record.results import read_results
from tests.support.fake_run import job_in


def test_a_finished_run_is_read_where_nothing_can_be_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole.parents[1], tmp_path / "runs")
    for module in (checks, execute):
        monkeypatch.setattr(module, "find_obstacle", lambda _: "read-only")
    job, folder = job_in(tmp_path / "runs"), tmp_path / "runs/fake" / whole.name
    check_runs_dir(job.settings, alone=True)
    with pytest.raises(ConfigError, match=r"^runs_dir=.*: cannot be written \(read-only\)$"):
        check_runs_dir(job.settings)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for finished in (job, job_in(tmp_path / "runs", method=Full(), budget=1)):
        outcome = execute.run(finished)
        assert outcome.reused
        assert outcome.results == read_results(outcome.folder)
    unfinished = "cannot be written (read-only), and the run is not finished in it"
    for other in (job_in(tmp_path / "runs", seed=1), job_in(tmp_path / "runs", evaluators={"ssim": Ssim()})):
        with pytest.raises(ConfigError, match=re.escape(unfinished)):
            execute.run(other)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (folder / "images/000001.png").write_bytes(b"torn")
    with pytest.raises(SampleSetError, match=r"000001\.png is not the recorded file"):
        execute.run(job)
