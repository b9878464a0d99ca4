"""Workers on two nodes of Ray that are killed at random; also a program: `python tests/support/two_nodes.py`.

Both nodes are processes of this machine. Ray starts a worker again whenever one is killed, and in the end the files are
compared with those of one process.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as a program it is in no package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kills import read_files

from kvbench.cli.jobs import read_entries
from kvbench.cli.work_log import WorkerLog, read_logs

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ("method=random,heatkv", "budget=0.1", "batch_size=1", "calibrate.count=2", "eval=[psnr]")
"""Two methods, one of them calibrated, and their reference."""
PATIENCE = 300.0
"""Seconds in which something must happen."""


@dataclass(frozen=True)
class Outcome:
    """What became of the kills.

    Attributes:
        kills: workers that were killed.
        workers: processes that worked.
        different: files that are not those of one process.
        drawn: samples that workers finished, by their logs.
        samples: samples of the sweep.
    """

    kills: int
    workers: int
    different: Sequence[str]
    drawn: int
    samples: int


@contextmanager
def start_nodes() -> Iterator[str]:
    """Start a Ray cluster of two nodes with a processor each; gives its address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    node = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)


def run_command(folder: Path, *words: str) -> str:
    """Run kvbench in a folder; gives what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(folder: Path, address: str, *words: str) -> tuple[Path, str]:
    """Submit two workers; gives the sweep's folder and what was printed."""
    ray = ("hydra/launcher=ray", f"hydra.launcher.ray.init.address={address}", "work.wait=false")
    out = run_command(
        folder, "task=work", *words, *ray, "work.workers=2", "hydra.launcher.ray.remote.max_retries=-1"
    )
    [sweep] = (folder / "runs/sweeps").iterdir()
    return sweep, out


def find_worker(sweep: Path, blocks: int = 0) -> WorkerLog | None:
    """Return a worker that runs and has done so many blocks; None when all jobs are finished."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if all(entry.outcome == "finished" for entry in read_entries(sweep)):
            return None
        running = [log for log in read_logs(sweep) if log.alive and len(log.blocks) >= blocks]
        if running:
            return random.choice(running)
        time.sleep(0.05)
    raise TimeoutError("".join(path.read_text() for path in sweep.glob("ray-*.log")))


def kill(log: WorkerLog) -> None:
    """Kill the process of a worker."""
    os.kill(int(log.name.split("-")[-2]), signal.SIGKILL)


def kill_workers(folder: Path, kills: int, samples: int) -> Outcome:
    """Have two workers on two nodes do a sweep, and kill one of them again and again.

    Args:
        folder: an empty one.
        kills: how often at most; less often if the sweep is finished before.
        samples: of a run.
    """
    together, alone = folder / "together", folder / "alone"
    together.mkdir()
    alone.mkdir()
    words = (*SWEEP, f"prompts.count={samples}")
    killed = 0
    with start_nodes() as address:
        sweep, _ = submit(together, address, *words)
        while killed < kills and (worker := find_worker(sweep)) is not None:
            time.sleep(random.uniform(0, 1))
            kill(worker)
            killed += 1
            while any(log.name == worker.name and log.alive for log in read_logs(sweep)):
                time.sleep(0.05)
        while find_worker(sweep) is not None:
            time.sleep(0.2)
        logs = read_logs(sweep)
    run_command(alone, "-m", *words)
    ours, theirs = read_files(together / "runs"), read_files(alone / "runs")
    visible = (
        name for name in {**ours, **theirs} if not Path(name).name.startswith(".")
    )  # others are claims
    different = [name for name in visible if ours.get(name) != theirs.get(name)]
    return Outcome(killed, len(logs), different, sum(log.samples for log in logs), 3 * samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(outcome := kill_workers(Path(temporary), options.kills, options.samples))
    sys.exit(bool(outcome.different))
