"""Wall time of one, two and four equal runs at a time, each with torch's own number of threads.

python -m benchmarks side_by_side [--prompts 32] [--repeats 2]
OMP_WAIT_POLICY=active python -m benchmarks side_by_side    (threads that spin while they wait)
"""

import argparse
import tempfile

from benchmarks.support.timing import time_processes


def time_runs(runs: int, prompts: int) -> float:
    """Return the seconds until so many runs, each in a folder of its own, are finished."""
    words = ["method=heatkv", "budget=0.04", "eval=psnr", f"prompts.count={prompts}"]
    with tempfile.TemporaryDirectory() as folder:
        return time_processes([*words, f"runs_dir={folder}/{run}"] for run in range(runs))


OPTIONS = {"prompts": 32, "repeats": 2}


def main(options: argparse.Namespace) -> None:
    """Print seconds, and their ratio to one run's."""
    alone = 0.0
    for runs in (1, 2, 4):
        seconds = min(time_runs(runs, options.prompts) for _ in range(options.repeats))
        alone = alone or seconds
        print(f"| {runs} at a time | {seconds:.1f} s | {seconds / alone:.2f} |", flush=True)
