"""Sweeps that go on in the background: their commands return at once, and what they leave is found."""

import re
import time
from pathlib import Path

import pytest

from kvbench.cli.sweeps.jobs import read_entries
from tests.support.command_line import Command, run_program
from tests.support.kills import read_files

SWEEP = ("method=full,swa", "budget=0.2", "prompts.count=1", "eval=[psnr]")


def wait_for_end(folder: Path) -> Path:
    """The sweep's folder, once the background process has printed its table."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in folder.glob("runs/sweeps/*/background.log"):
            if "infinity_tiny (± half of the 95 % interval)" in log.read_text():
                return log.parent
        time.sleep(0.1)
    raise TimeoutError([path.read_text() for path in folder.glob("runs/sweeps/*/background.log")])


@pytest.mark.slow
@pytest.mark.parametrize("words", [("-m", *SWEEP), ("task=work", *SWEEP)], ids=("jobs", "workers"))
def test_a_sweep_goes_on_in_the_background(words: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    done = run_program(tmp_path, *words, "work.wait=false")
    assert done.returncode == 0, done.stderr
    line = done.stdout.strip().splitlines()[-1]
    told = re.search(r"task=status (work\.folder=(\S+)); .*kill -INT -- -(\d+);", line)
    assert told is not None
    assert not (tmp_path / told[2] / "job-00001.json").is_file()  # it has returned before the end
    folder = wait_for_end(tmp_path)
    assert folder == tmp_path / told[2]
    assert [entry.outcome for entry in read_entries(folder)] == ["finished", "finished"]
    assert "jobs: 2 done, 0 running, 0 failed, 0 missing" in command("task=status", told[1])[1]
    found = read_files(tmp_path / "runs")
    assert command(*words)[0] == 0  # waiting, it finds everything done
    assert read_files(tmp_path / "runs") == found


@pytest.mark.slow
def test_errors_precede_the_return(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for words, said in {
        ("-m", "method=swa", "budgit=0.2"): "budgit: no such key",
        ("-m", *SWEEP, "hydra/launcher=submitit_slurm"): "hydra/launcher=submitit_slurm: ",
        ("task=work", *SWEEP, "hydra/launcher=submitit_slurm"): "hydra/launcher=submitit_slurm: ",
        ("method=swa", "budget=0.2"): "work.wait=false: only for sweeps (-m) and task=work",
    }.items():
        status, _, err = command(*words, "work.wait=false")
        assert status == 1
        assert err.splitlines()[-1].startswith(f"error: {said}")
    assert not [*tmp_path.rglob("background.log")]
