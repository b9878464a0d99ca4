"""Claims that processes make on the work of one folder: how many a second, and whether any work is done twice.

All processes go through the same pieces of work in the same order, as workers of a sweep do. Each claims a piece, does
it unless its mark is there, marks it and releases it. `busy` counts the claims that were refused.

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
from kvbench.core.locks import claim

OPTIONS = {
    "folder": Option(None, "where to work, on the file system in question; a temporary folder by default"),
    "processes": Option([2, 20, 200], "how many at a time, each measured"),
    "work": Option(1000, "pieces of work"),
}


def main(options: argparse.Namespace) -> int:
    """Print a row per number of processes; return 1 if any piece of work was done twice or not at all."""
    table = Table({"claims/s": ".0f", "busy": "d", "twice": "d", "missing": "d"}, "processes")
    wrong = 0
    for count in options.processes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            seconds, done, busy = measure(Path(folder), count, options.work)
        twice, missing = len(done) - len(set(done)), options.work - len(set(done))
        table.add(str(count), len(done) / seconds, busy, twice, missing)
        wrong += twice + missing
    return int(wrong > 0)


def measure(folder: Path, processes: int, work: int) -> tuple[float, list[int], int]:
    """Have processes share pieces of work; return seconds, the pieces that any of them did, and refused claims."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(processes + 1), context.SimpleQueue()
    workers = [
        context.Process(target=lambda: results.put(claim_all(folder, work, start))) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    start.wait()
    started = time.perf_counter()
    found = [results.get() for _ in workers]
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds, [piece for done, _ in found for piece in done], sum(busy for _, busy in found)


def claim_all(folder: Path, work: int, start: Barrier) -> tuple[list[int], int]:
    """Go through pieces of work until all are marked; return those that this process did, and its refused claims."""
    done, busy, left = [], 0, list(range(work))
    start.wait()
    while left:
        for piece in left:
            mark = folder / f"{piece}.done"
            if mark.exists():
                continue
            with claim(folder / f".{piece}", wait=False) as mine:
                busy += not mine
                if mine and not mark.exists():
                    mark.touch()
                    done.append(piece)
        left = [piece for piece in left if not (folder / f"{piece}.done").exists()]
    return done, busy
