"""Simulation of many workers that share one sweep: wall time, efficiency, and calls on files in the busiest second.

The order of work is that of the real workers (`kvbench.cli.workers.work`). The calls on files that each step makes
were counted on real runs. The file server, which all workers ask, serves `--rate` calls a second. Not simulated:
calibrations, the bandwidth of the file server (samples, weights), and workers that fail.

Columns: `efficiency` is the time of all blocks, divided by workers and wall time. Of the workers' time, blocks took
`draw`, waiting for files `files`, compositions of configurations `compose`, pauses while all work was in other hands
`pause`, and what came after a worker had nothing left to do `idle`.

python -m benchmarks workers [--workers 8 100 800] [--rate 5000 50000] [--block-seconds 20] [--jitter 60]
"""

import argparse

from benchmarks.support.arguments import Option
from benchmarks.support.file_calls import REMEDY, can_count
from benchmarks.support.simulated_sweep import FileServer, Simulation, Sweep
from benchmarks.support.table import Table
from benchmarks.support.worker_costs import Costs, measure_costs

COSTS = Costs(
    look=2.25,
    refused=1,
    attempt=212,
    attempt_seconds=0.08,
    first=439.5,
    known=8,
    read=48,
    block=471.25,
    busy=10,
)
"""Costs for blocks of 8 samples, by `--measure` on two cores of an AMD EPYC."""
OPTIONS = {
    "workers": Option([8, 100, 800], "how many workers, each number simulated"),
    "rate": Option([5000.0, 50000.0], "calls a second that the file server serves, each simulated"),
    "call_seconds": Option(1e-4, "seconds of a call if nobody else asks"),
    "jobs": Option(100, "runs of the sweep, beside the reference"),
    "blocks": Option(100, "blocks of a run"),
    "block_seconds": Option(20.0, "mean time of a block"),
    "spread": Option(0.1, "standard deviation of a block's time, a share of the mean"),
    "score_seconds": Option(10.0, "time to score a run"),
    "load_seconds": Option(60.0, "time from a worker's start until its model is loaded"),
    "jitter": Option(0.0, "work.jitter"),
    "seed": Option(0, "of the blocks' times"),
    "measure": Option(0, "samples of a block: measure the costs first, with strace, in minutes"),
}
SHARES = {"draw": "drawing", "score": "scoring", "load": "loading", "compose": "composing", "files": "files"}
SHARES |= {"pause": "pausing", "idle": "idle"}
"""Columns of the table, and the kinds of steps in them."""


def main(options: argparse.Namespace) -> None:
    """Print a row for each file server and number of workers.

    Raises:
        ValueError: costs cannot be measured without strace.
    """
    costs = COSTS
    if options.measure:
        if not can_count():
            raise ValueError(f"--measure: {REMEDY}")
        costs = measure_costs(options.measure)
        print(costs)
    names = ("jobs", "blocks", "block_seconds", "spread", "score_seconds", "load_seconds", "jitter", "seed")
    sweep = Sweep(**{name: getattr(options, name) for name in names})
    columns = {"wall s": ".0f", "efficiency": ".2f", "calls/s": ".0f", **dict.fromkeys(SHARES, ".1%")}
    table = Table(columns, "workers, rate")
    for rate in options.rate:
        for workers in options.workers:
            found = Simulation(sweep, costs, workers, FileServer(rate, options.call_seconds)).run()
            shares = [found.shares.get(kind, 0.0) for kind in SHARES.values()]
            table.add(f"{workers}, {rate:g}/s", found.seconds, found.efficiency, found.peak, *shares)
