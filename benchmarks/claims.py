"""Claims that processes make on the work of one folder: how many a second, and whether any work is done twice.

All processes go through the same pieces of work in the same order, as workers of a sweep do. Each claims a piece, does
it unless its mark is there, marks it and releases it. `busy` counts the claims that were refused. Where strace is
installed, the system calls on files of the folder that one process makes for a piece are counted, mark included.

python -m benchmarks claims [--folder /mnt/shared] [--processes 200] [--work 2000]
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.support.arguments import Option
from benchmarks.support.file_calls import REMEDY, begin_section, can_count, count_calls
from benchmarks.support.table import Table
from kvbench.core.claims import claim

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
    if can_count():
        calls = count_for_a_piece(options.folder)
        named = ", ".join(f"{count:g} {name}" for name, count in calls.most_common())
        print(f"calls on files for a piece: {calls.total():g} ({named})")
    else:
        print(f"calls on files for a piece: not counted; {REMEDY}")
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


def count_for_a_piece(folder: str | None, work: int = 50) -> Counter[str]:
    """Return how often one process calls the system for a piece of work, by the call's name, on average."""
    with tempfile.TemporaryDirectory(dir=folder) as made, tempfile.TemporaryDirectory() as beside:
        program = f"from {__name__} import claim_marked; claim_marked({made!r}, {work})"
        found = count_calls([sys.executable, "-c", program], Path(made).resolve(), Path(beside, "trace"))
    return Counter({name: round(count / work, 2) for name, count in found["pieces"].items()})


def claim_marked(folder: str, work: int) -> None:
    """Go through pieces of work alone, in a section of a trace."""
    begin_section("pieces")
    claim_all(Path(folder), work, multiprocessing.Barrier(1))


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
