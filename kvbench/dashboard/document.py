"""The page's data as one JSON value."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from kvbench import __version__
from kvbench.dashboard.folders import find_folders
from kvbench.dashboard.pool import Pool
from kvbench.dashboard.published_tables import list_tables
from kvbench.dashboard.repeat import write_command
from kvbench.dashboard.retention_maps import pack_retention
from kvbench.dashboard.samples import list_samples
from kvbench.dashboard.sweeps import find_sweeps
from kvbench.eval.protocol.intervals import NORMAL_CLUSTERS, find_quantile
from kvbench.eval.protocol.scores import Metric
from kvbench.report.figures.method_styles import COLOURS, DARK_COLOURS, choose_styles
from kvbench.report.runs_table import find_metric, list_metrics, name_methods
from kvbench.runs.record.results import Results

SHARED_FIELDS = ("better", "unit", "digits", "detail", "evaluator", "needs_reference")
"""Fields of a metric that are equal in all runs; the page stores them once."""
RUN_FIELDS = ("value", "ci95", "sd", "se", "bias")
"""Fields of a metric that differ between runs."""
CONTACT_SHEET = "contact_sheet.png"


def make_document(runs_dir: Path) -> dict[str, object]:
    """Return the runs below `runs_dir` with numbers and provenance, unfinished and damaged runs, and sweeps.

    `shared` holds values that runs reference by number: sections of configurations and provenance, prompts and texts.
    `quantiles` are the 97.5 % quantiles of Student's distribution for 2, 3, ... clusters.
    """
    folders, pool = find_folders(runs_dir), Pool()
    runs = list(folders.finished.values())
    labels = name_methods(runs)
    places = {folder: number for number, folder in enumerate(folders.finished)}
    samples = list_samples(folders.finished, pool)
    described = [
        _describe_run(folder, run, label, places, pool)
        | {"folder": folder.relative_to(runs_dir).as_posix(), "samples": samples[folder]}
        for (folder, run), label in zip(folders.finished.items(), labels, strict=True)
    ]
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "metrics": _describe_metrics(runs),
        "quantiles": [find_quantile(count) for count in range(2, NORMAL_CLUSTERS + 1)],
        "palette": {"light": COLOURS, "dark": DARK_COLOURS},
        "styles": {
            label: {"colour": COLOURS.index(colour), "marker": marker}
            for label, (colour, marker, _) in choose_styles(sorted(set(labels))).items()
        },
        "runs": described,
        "published": list_tables(runs),
        "sweeps": [asdict(one) for one in find_sweeps(runs_dir)],
        "unfinished": [asdict(one) for one in folders.unfinished],
        "damaged": [asdict(one) for one in folders.damaged],
        "shared": pool.values,
    }


def _describe_metrics(runs: list[Results]) -> dict[str, dict[str, object]]:
    """Return the shared fields of each metric that has a value in some run, in the order of tables."""
    first = {name: metric for run in reversed(runs) for name, metric in run.metrics.items()}
    names = list_metrics(runs, details=True)
    return {name: {key: getattr(first[name], key) for key in SHARED_FIELDS} for name in names}


def _describe_run(
    folder: Path, run: Results, label: str, places: Mapping[Path, int], pool: Pool
) -> dict[str, object]:
    return {
        "model": run.model_label,
        "prompts": run.prompts_label,
        "method": run.method,
        "label": label,
        "budget": run.memory.budget,
        "unit": run.memory.budget_unit,
        "n": run.n,
        "reference": None if run.reference is None else places.get(folder.parent / run.reference),
        "memory": asdict(run.memory),
        "latency": asdict(run.latency),
        "metrics": {
            name: _describe_metric(metric, pool) for name in run.metrics if (metric := find_metric(run, name))
        },
        "evaluated": {name: pool.add(asdict(entry)) for name, entry in run.evaluated.items()},
        "config": {key: pool.add(value) for key, value in run.config.items()},
        "provenance": {key: pool.add(value) for key, value in (run.provenance or {}).items()},
        "command": write_command(run),
        "finished": run.finished,
        "sheet": (folder / CONTACT_SHEET).is_file(),
        "retention": pack_retention(folder),
    }


def _describe_metric(metric: Metric, pool: Pool) -> dict[str, object]:
    """Return a metric's numbers, and its other fields, which many runs share, as `how`."""
    values = asdict(metric)
    numbers = {key: _shorten(values.pop(key)) for key in RUN_FIELDS}
    how = {
        key: value for key, value in values.items() if key not in SHARED_FIELDS and value not in (None, "")
    }
    known = {key: value for key, value in numbers.items() if value is not None}
    return {"value": None, **known, "how": pool.add(how)}


def _shorten(value: float | tuple[float | None, ...] | None) -> object:
    """Round numbers to nine significant digits."""
    if isinstance(value, tuple):
        return [_shorten(end) for end in value]
    return None if value is None else float(f"{value:.9g}")
