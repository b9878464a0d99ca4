"""Real processes that are killed, interrupted, or run out of disk: what was done is kept, and one line tells why."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import RUN, run_python
from tests.support.kills import read_files
from tests.support.places import ROOT

ARGUMENTS = ("method=random", "budget=0.1", "prompts.count=3", "batch_size=1", "eval=none")


def run(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run a command to its end; gives its exit status and the lines it wrote to stderr, without progress bars."""
    done = run_python(folder, RUN, *arguments)
    return done.returncode, told(done.stderr)


def told(stderr: str) -> list[str]:
    return [line for line in stderr.replace("\r", "\n").splitlines() if line.strip() and "prompt" not in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, *ARGUMENTS)[0] == 0
    return read_files(folder / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.nightly)])
def test_killed_at_random_moments_a_sweep_ends_with_the_same_bytes(kills: int) -> None:
    program = [sys.executable, str(ROOT / "tests/support/kills.py"), "--kills", str(kills)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300 * kills)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{kills} kills in \d+ sweeps: 0 files differ", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True])
def test_an_interrupted_run_resumes(tmp_path: Path, undisturbed: dict[str, bytes], sweep: bool) -> None:
    arguments = ("-m", *ARGUMENTS) if sweep else ARGUMENTS
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell may ignore it
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # which runs record
    process = subprocess.Popen([sys.executable, RUN, *arguments], cwd=tmp_path, env=env, **outputs)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 600
    while not [*tmp_path.rglob("samples.jsonl")] and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 130
    assert told(stderr) == ["interrupted; run the same command again to resume"]
    statuses = {path.read_text() for path in tmp_path.rglob("status")}
    assert "interrupted\n" in statuses <= {"interrupted\n", "done\n"}
    assert run(tmp_path, *arguments)[0] == 0
    assert read_files(tmp_path / "runs") == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few hundred kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_run_resumes_after_a_full_disk(small_disk: Path, undisturbed: dict[str, bytes]) -> None:
    status, lines = run(small_disk, *ARGUMENTS)
    assert status == 1
    [line] = lines
    assert re.fullmatch(
        r"error: \[Errno 28\] No space left on device: 'runs/\S+'; free disk space and run the same command again .+",
        line,
    )
    assert [*small_disk.rglob("images/*.png")]
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    assert run(small_disk, *ARGUMENTS)[0] == 0
    assert read_files(small_disk / "runs") == undisturbed
