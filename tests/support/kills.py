"""Forked processes, and a sweep killed and started again; also a program: `python tests/support/kills.py --kills 50`.

Every attempt is a process of its own, forked from one that has imported everything: SIGKILL ends it wherever it is.
Once an attempt comes to its end the files are compared with those of a sweep that nobody disturbed, and the next round
starts with nothing.
"""

import argparse
import ctypes
import importlib
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SWEEP = ("-m", "method=random,heatkv", "budget=0.1", "eval=[psnr]")
"""Two methods, one of them calibrated, and their reference."""
TIMES = ("seconds", "latency", "finished", "provenance", "started", "created", "load")
"""What differs between two runs that are the same: when, how long, where and beside what."""
DELAYS = (0.05, 0.95)
"""Bounds of the moment of a kill, in units of the time that an undisturbed sweep takes."""


@dataclass
class Report:
    """What became of the kills.

    Attributes:
        kills: processes that were killed.
        rounds: sweeps that came to their end in spite of them.
        different: files that are not what they are without kills, by round.
        left: files that nobody knows, of all rounds.
    """

    kills: int = 0
    rounds: int = 0
    different: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Fork:
    """A process forked from this one, which begins with what is imported here and runs a function in a folder.

    Its standard streams are files, its signals those of a new program. It exits as a program that ends with the
    function: 0, or what `SystemExit` says, 1 after any other error.

    Args:
        run: called without arguments.
        folder: working directory; must exist.
        log: folder for the files `out` and `err`, made if need be; outside the working directory if that is examined.
    """

    def __init__(self, run: Callable[[], object], folder: Path, log: Path) -> None:
        log.mkdir(exist_ok=True)
        for name in ("out", "err"):
            (log / name).write_bytes(b"")
        self._log = log
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                status = self._act(run, folder)
            finally:
                os._exit(status)

    def _act(self, run: Callable[[], object], folder: Path) -> int:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the tests
        os.chdir(folder)
        sys.stdout, sys.stderr = self._redirect("out", 1), self._redirect("err", 2)
        logging.getLogger().handlers.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
        status = 0
        try:
            run()
        except SystemExit as leaving:
            status = 1 if isinstance(leaving.code, str) else int(leaving.code or 0)
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        return status

    def _redirect(self, name: str, descriptor: int) -> TextIO:
        file = os.open(self._log / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
        return os.fdopen(descriptor, "w", buffering=1, closefd=False)

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""
        if self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if done else None
        return self._status

    def wait(self, timeout: float = 300) -> int:
        """Wait for its end and return the exit status; a process that takes longer is killed."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise TimeoutError(f"a process did not end within {timeout} s: {self.read('err')}")
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def read(self, name: str) -> str:
        """What it has written so far to `out` or `err`."""
        return (self._log / name).read_text()


def fork_command(folder: Path, arguments: Sequence[str], log: Path) -> Fork:
    """Fork a process that runs the command line in a folder."""

    def run() -> None:
        from kvbench.cli.app import main

        sys.argv = ["run.py", *arguments]
        main()

    return Fork(run, folder, log)


def read_files(runs: Path) -> dict[str, bytes]:
    """Return what the files of all runs and calibrations in a `runs_dir` say apart from times, by name."""
    return {
        str(path.relative_to(runs)): _strip_times(path)
        for path in sorted(runs.glob("*_tiny/**/*"))
        if path.is_file() and path.name != ".lock"
    }


def _strip_times(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix not in (".json", ".jsonl"):
        return content
    lines = [content] if path.suffix == ".json" else content.splitlines()
    values = [drop_keys(json.loads(line), TIMES) for line in lines]
    return b"\n".join(json.dumps(one, sort_keys=True).encode() for one in values)


def drop_keys(value: object, names: Collection[str]) -> object:
    """Return JSON values without some keys, however deep these stand."""
    if isinstance(value, dict):
        return {key: drop_keys(inner, names) for key, inner in value.items() if key not in names}
    return [drop_keys(inner, names) for inner in value] if isinstance(value, list) else value


def kill_at_random(
    root: Path, kills: int, seed: int, tell: Callable[[str], None] = lambda _: None, each: int = 2
) -> Report:
    """Disturb a sweep until so many of its processes were killed.

    Args:
        root: an empty folder.
        kills: how many.
        seed: of the moments.
        tell: gets a line a round.
        each: images of a block, of which a run has two.
    """
    rng, report = random.Random(seed), Report()
    began = time.monotonic()
    whole = _start(root / "undisturbed", each)
    assert whole.wait() == 0, whole.read("err")
    took = time.monotonic() - began
    expected = read_files(root / "undisturbed/runs")
    while report.kills < kills:
        folder, before = root / f"round-{report.rounds}", report.kills
        delay = took * rng.uniform(*DELAYS)
        while _is_killed(_start(folder, each), delay):
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


def _start(folder: Path, each: int) -> Fork:
    folder.mkdir(exist_ok=True)
    counts = (f"prompts.count={2 * each}", f"batch_size={each}", f"calibrate.count={each}")
    return fork_command(folder, (*SWEEP, *counts), folder / "log")


def _is_killed(child: Fork, delay: float) -> bool:
    """Kill a process after some seconds; returns False if it came to a good end before."""
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        if child.poll() is not None:
            assert child.poll() == 0, child.read("err")
            return False
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    return child.wait() == -signal.SIGKILL


def prepare() -> None:
    """Import whatever a sweep imports, in one thread: a fork would lose the others."""
    import torch

    torch.set_num_threads(1)
    for name in ("kvbench.cli.tasks", "kvbench.report.plots"):
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
