"""Rows of the page for runs that differ only in seeds: means with intervals over prompts and seeds."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.dashboard.metrics import describe_metrics
from kvbench.report.seeds import Combined, combine_seeds
from kvbench.runs.record.results import Results


def list_means(runs: Sequence[Results], runs_dir: Path) -> list[dict[str, object]]:
    """Return a row for each group of runs that differ only in seeds: the numbers of its runs, costs and metrics.

    Runs whose records are damaged, or have other prompts, have no row.
    """
    places = {id(run): number for number, run in enumerate(runs)}
    return [
        {
            "runs": [places[id(run)] for run in row.members],
            "memory": vars(row.memory),
            "latency": vars(row.latency),
            "metrics": describe_metrics(row),
        }
        for row in combine_seeds(runs, runs_dir)
        if isinstance(row, Combined)
    ]
