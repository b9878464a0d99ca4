"""Workers on two nodes of Ray or Slurm that are killed at random; also a program: `python -m tests.support.two_nodes`.

Both nodes are processes of this machine. Ray starts a worker again whenever one is killed; a Slurm job is queued again
as after the failure of a node. In the end the files are compared with those of one process.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvbench.cli.workers.log import WorkerLog, read_logs
from kvbench.runs.record.sweeps import read_entries
from tests.support import slurm
from tests.support.command_line import RUN, run_python
from tests.support.kills import read_files

SWEEP = ("method=random,heatkv", "budget=0.1", "batch_size=1", "calibrate.count=2", "eval=[psnr]")
"""Two methods, one of them calibrated, and their reference."""
PATIENCE = 300.0
"""Seconds in which something must happen."""


@dataclass(frozen=True)
class Outcome:
    """Killed workers, all workers, files unlike those of one process, samples by the logs, samples of the sweep."""

    kills: int
    workers: int
    different: Sequence[str]
    drawn: int
    samples: int


@dataclass(frozen=True)
class Cluster:
    """Two nodes for a worker each; `revive` starts a killed worker again, given its Slurm job, if it has one."""

    words: tuple[str, ...]  # which submit two workers
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    revive: Callable[[str | None], None] = lambda job: None


@contextmanager
def start_ray() -> Iterator[Cluster]:
    """Start a Ray cluster of two nodes with a processor each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster as RayCluster

    before = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    node = {"num_cpus": 1, "include_dashboard": False}
    cluster = RayCluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1)
        address = f"hydra.launcher.ray.init.address={cluster.address}"
        yield Cluster(("hydra/launcher=ray", address, "hydra.launcher.ray.remote.max_retries=-1"))
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def start_slurm() -> Iterator[Cluster]:
    """Start a Slurm cluster of two nodes with a processor each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm.start_cluster(Path(folder), cores=(1, 1)) as environment,
    ):
        yield Cluster(("hydra/launcher=submitit_slurm",), environment, partial(slurm.requeue, environment))


CLUSTERS: Mapping[str, Callable[[], AbstractContextManager[Cluster]]] = {
    "ray": start_ray,
    "slurm": start_slurm,
}


def run_command(folder: Path, *words: str, environment: Mapping[str, str] = {}) -> str:
    """Run kvbench in a folder; gives what it printed."""
    done = run_python(folder, RUN, *words, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(folder: Path, cluster: Cluster, *words: str) -> tuple[Path, str]:
    """Submit two workers; gives the sweep's folder and what was printed."""
    submitted = (*cluster.words, "work.wait=false", "work.workers=2")
    out = run_command(folder, "task=work", *words, *submitted, environment=cluster.environment)
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


def kill(log: WorkerLog) -> str | None:
    """Kill the process of a worker; gives the Slurm job that it is, if it is one."""
    process = log.name.split("-")[-2]
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    os.kill(int(process), signal.SIGKILL)
    found = dict(line.partition("=")[::2] for line in variables)
    job = (found.get("SLURM_ARRAY_JOB_ID"), found.get("SLURM_ARRAY_TASK_ID"))
    return f"{job[0]}_{job[1]}" if all(job) else None


def kill_workers(
    folder: Path, start: Callable[[], AbstractContextManager[Cluster]], kills: int, samples: int
) -> Outcome:
    """Have two workers on two nodes do a sweep, and kill one again and again, `kills` times at most."""
    together, alone = folder / "together", folder / "alone"
    together.mkdir()
    alone.mkdir()
    words = (*SWEEP, f"prompts.count={samples}")
    killed = 0
    with start() as cluster:
        sweep, _ = submit(together, cluster, *words)
        while killed < kills and (worker := find_worker(sweep)) is not None:
            time.sleep(random.uniform(0, 1))
            job = kill(worker)
            killed += 1
            while any(log.name == worker.name and log.alive for log in read_logs(sweep)):
                time.sleep(0.05)
            cluster.revive(job)
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
    parser.add_argument("cluster", choices=CLUSTERS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        cluster = CLUSTERS[options.cluster]
        print(outcome := kill_workers(Path(temporary), cluster, options.kills, options.samples))
    sys.exit(bool(outcome.different))
