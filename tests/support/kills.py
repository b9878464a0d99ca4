"""A sweep killed at random moments and started again; also a program: `python tests/support/kills.py --kills 50`.

Every attempt is a process of its own, forked from one that has imported everything, and SIGKILL ends it anywhere. The
files of an attempt that ends are compared with those of an undisturbed sweep, and the next round starts with nothing.
"""

import argparse
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SWEEP = (
    "-m", "method=random,heatkv", "budget=0.1", "prompts.count=4", "batch_size=2", "calibrate.count=2", "eval=[psnr]",
)  # fmt: skip
"""Two methods, one of them calibrated, and their reference: two blocks of images each."""
TIMES = ("seconds", "latency", "finished", "provenance", "started", "created", "load")
"""What differs between two runs that are the same: when, how long, where and beside what."""
DELAYS = (0.05, 0.95)
"""Bounds of the moment of a kill, in units of the time that an undisturbed sweep takes."""


@dataclass
class Report:
    """Counts of killed processes and finished sweeps, files that differ by round, and unknown files left behind."""

    kills: int = 0
    rounds: int = 0
    different: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def start(folder: Path) -> int:
    """Fork a process that runs the sweep in a new or used folder; returns its number."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.chdir(folder)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["run.py", *SWEEP]
        from kvbench.cli.app import main

        main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def finish(child: int) -> int:
    """Wait for a process; returns its exit status, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_files(runs: Path, left_out: Collection[str] = TIMES) -> dict[str, bytes]:
    """Return what the files of all runs and calibrations in a `runs_dir` say, by name, without some keys of JSON."""
    return {
        str(path.relative_to(runs)): _drop_keys(path, left_out)
        for path in sorted(runs.glob("*_tiny/**/*"))
        if path.is_file() and path.name != ".lock"
    }


def _drop_keys(path: Path, left_out: Collection[str]) -> bytes:
    content = path.read_bytes()
    if path.suffix not in (".json", ".jsonl"):
        return content
    lines = [content] if path.suffix == ".json" else content.splitlines()
    values = [drop_keys(json.loads(line), left_out) for line in lines]
    return b"\n".join(json.dumps(one, sort_keys=True).encode() for one in values)


def drop_keys(value: object, names: Collection[str]) -> object:
    """Return JSON values without some keys, however deep these stand."""
    if isinstance(value, dict):
        return {key: drop_keys(inner, names) for key, inner in value.items() if key not in names}
    return [drop_keys(inner, names) for inner in value] if isinstance(value, list) else value


def kill_at_random(root: Path, kills: int, seed: int, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Kill processes of a sweep in an empty folder at random moments; `tell` gets a line each round."""
    rng, report = random.Random(seed), Report()
    for name in ("warm", "undisturbed"):  # what is read for the first time takes longer
        began = time.monotonic()
        assert finish(start(root / name)) == 0, (root / name / "log").read_text()
        took = time.monotonic() - began
    expected = read_files(root / "undisturbed/runs")
    while report.kills < kills:
        folder, before = root / f"round-{report.rounds}", report.kills
        delay = took * rng.uniform(*DELAYS)
        while _is_killed(start(folder), delay):
            report.kills += 1
            delay = took * rng.uniform(*DELAYS) if report.kills < kills else math.inf
        report.rounds += 1
        found = read_files(folder / "runs")
        hidden = {name for name in found if name not in expected and Path(name).name.startswith(".")}
        report.left += [f"{folder.name}: {name}" for name in sorted(hidden)]
        report.different += [
            f"{folder.name}: {name}"
            for name in sorted((set(found) | set(expected)) - hidden)
            if found.get(name) != expected.get(name)
        ]
        tell(
            f"{folder.name}: {report.kills - before} kills, {len(expected)} files, {len(report.different)} differ"
        )
        shutil.rmtree(folder)
    return report


def _is_killed(child: int, delay: float) -> bool:
    """Kill a process after some seconds; returns False if it came to a good end before."""
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return finish(child) == -signal.SIGKILL


def prepare() -> None:
    """Import whatever a sweep imports, in one thread: a fork would lose the others."""
    import torch

    torch.set_num_threads(1)
    for name in ("kvbench.cli.tasks.run", "kvbench.cli.tasks.calibrate", "kvbench.report.figures.plots"):
        importlib.import_module(name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as temporary:
        report = kill_at_random(Path(temporary), options.kills, options.seed, print)
    for name in (*report.different, *report.left):
        print(name)
    print(
        f"{report.kills} kills in {report.rounds} sweeps: {len(report.different)} files differ, "
        f"{len(report.left)} unfinished ones are left under hidden names"
    )
    sys.exit(bool(report.different))
