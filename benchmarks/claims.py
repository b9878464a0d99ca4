"""Claims that processes make on the work of one folder: claims per second, and work that is done twice or not at all.

All processes go through the same pieces of work in the same order, as workers of a sweep do. Each claims a piece, does
it unless it is marked as done, marks it and releases it. `busy` counts refused claims.

python -m benchmarks claims [--folder /mnt/shared] [--processes 200] [--work 2000]
"""

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.support.arguments import Option
from benchmarks.support.table import Table
from kvbench.core.claims import claim

OPTIONS = {
    "folder": Option(None, "folder on the file system to check; a temporary folder by default"),
    "processes": Option([2, 20, 200], "numbers of processes, each measured"),
    "work": Option(1000, "pieces of work"),
}


def main(options: argparse.Namespace) -> int:
    """Print a row per number of processes; return 1 if any piece of work was done twice or not at all."""
    table = Table({"claims/s": ".0f", "busy": "d", "twice": "d", "missing": "d"}, "processes")
    errors = 0
    for count in options.processes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            seconds, done, busy = measure(Path(folder), count, options.work)
        twice, missing = len(done) - len(set(done)), options.work - len(set(done))
        table.add(str(count), len(done) / seconds, busy, twice, missing)
        errors += twice + missing
    return int(errors > 0)


def measure(folder: Path, processes: int, work: int) -> tuple[float, list[int], int]:
    """Let processes share pieces of work; return seconds, the pieces that each process did, and refused claims."""
    context = multiprocessing.get_context("fork")
    start, queue = context.Barrier(processes + 1), context.SimpleQueue()
    workers = [
        context.Process(target=lambda: queue.put(claim_all(folder, work, start))) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    start.wait()
    started = time.perf_counter()
    results = [queue.get() for _ in workers]
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds, [piece for done, _ in results for piece in done], sum(busy for _, busy in results)


def claim_all(folder: Path, work: int, start: Barrier) -> tuple[list[int], int]:
    """Go through pieces of work until all are marked; return the pieces of this process and its refused claims."""
    done, busy, pending = [], 0, list(range(work))
    start.wait()
    while pending:
        for piece in pending:
            mark = folder / f"{piece}.done"
            if mark.exists():
                continue
            with claim(folder / f".{piece}", wait=False) as mine:
                busy += not mine
                if mine and not mark.exists():
                    mark.touch()
                    done.append(piece)
        pending = [piece for piece in pending if not (folder / f"{piece}.done").exists()]
    return done, busy
