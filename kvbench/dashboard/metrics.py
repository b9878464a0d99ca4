"""Metrics of runs as JSON values."""

from collections.abc import Mapping

from kvbench.dashboard.pool import Pool
from kvbench.report.full_scores import find_full, is_failed
from kvbench.report.runs_table import find_metric
from kvbench.runs.record.results import Results

SHARED_FIELDS = ("better", "unit", "digits", "detail", "evaluator", "needs_reference")
"""Fields of a metric that are equal in all runs; the page stores them once."""
RUN_FIELDS = ("value", "ci95", "sd", "se", "bias", "df", "between", "full")
"""Fields of a metric that differ between runs: `df` and `between` of means over seeds, `full` of accuracies."""


def list_known(run: Results) -> dict[str, Mapping[str, object]]:
    """Return the fields of every metric of a run that was requested and applies to it.

    An accuracy has the full cache's as `full`, and whether the full cache `failed` the task.
    """
    return {
        name: {**vars(metric), "full": find_full(run, name), "failed": is_failed(run, name) or None}
        for name in run.metrics
        if (metric := find_metric(run, name))
    }


def describe_metrics(metrics: Mapping[str, Mapping[str, object]], pool: Pool) -> dict[str, object]:
    """Return the numbers of metrics, and their other fields, which many runs share, as `how`."""
    return {name: _describe(fields, pool) for name, fields in metrics.items()}


def _describe(fields: Mapping[str, object], pool: Pool) -> dict[str, object]:
    known = {key: _shorten(fields[key]) for key in RUN_FIELDS if fields.get(key) is not None}
    rest = {
        key: value
        for key, value in fields.items()
        if key not in SHARED_FIELDS and key not in RUN_FIELDS and value not in (None, "")
    }
    return {"value": None, **known, "how": pool.add(rest)}


def _shorten(value: object) -> object:
    """Round numbers to nine significant digits."""
    if isinstance(value, tuple | list):
        return [_shorten(end) for end in value]
    return float(f"{value:.9g}") if isinstance(value, int | float) else None
