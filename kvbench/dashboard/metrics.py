"""Metrics of runs as JSON values, and rows of means over runs that differ only in seeds."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.dashboard.pool import shorten
from kvbench.eval.protocol.scores import are_answers
from kvbench.report.full_scores import find_full, is_failed
from kvbench.report.runs_table import find_metric
from kvbench.report.seeds import Combined, combine_seeds
from kvbench.runs.record.results import Results

SHARED_FIELDS = ("better", "unit", "digits", "detail")
"""Fields of a metric that are equal in all runs; the page stores them once."""
DIGITS = 9
"""Significant digits of a metric's numbers."""


def describe_metrics(run: Results) -> dict[str, object]:
    """Return the values of every metric of a run that was requested and applies to it.

    A metric without a value has its status and the reason. An accuracy has the full cache's accuracy as `full`, and
    `failed` if the full cache fails the task; a metric of right and wrong answers has `answers`.
    """
    described: dict[str, object] = {}
    for name in run.metrics:
        if (metric := find_metric(run, name)) is None:
            continue
        fields = {
            "ci95": None if metric.ci95 is None else [shorten(end, DIGITS) for end in metric.ci95],
            "full": shorten(find_full(run, name), DIGITS),
            "failed": is_failed(run, name) or None,
            "answers": are_answers(metric.ci) or None,
            "prompts_only": getattr(metric, "prompts_only", False) or None,
            "status": None if metric.status == "ok" else metric.status,
            "reason": metric.reason or None,
        }
        known = {key: value for key, value in fields.items() if value is not None}
        described[name] = {"value": shorten(metric.value, DIGITS), **known}
    return described


def list_means(runs: Sequence[Results], runs_dir: Path) -> list[dict[str, object]]:
    """Return a row for each group of runs that differ only in seeds: the indices of its runs, costs and metrics.

    Runs of an `equal` row have the same samples, which count once. Runs whose records are damaged, or have other
    prompts, have no row.
    """
    indices = {id(run): index for index, run in enumerate(runs)}
    return [
        {
            "runs": [indices[id(run)] for run in row.members],
            "equal": row.equal,
            "memory": vars(row.memory),
            "latency": vars(row.latency),
            "metrics": describe_metrics(row),
        }
        for row in combine_seeds(runs, runs_dir)
        if isinstance(row, Combined)
    ]
