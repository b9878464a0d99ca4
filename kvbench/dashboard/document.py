"""The page's data as one JSON value: runs, sweeps and published tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.dashboard.datasets import NO_DATASETS, AddedRun, LoadedDatasets, relate
from kvbench.dashboard.folders import Sweep, find_folders, find_sweeps
from kvbench.dashboard.metrics import SHARED_FIELDS, describe_metrics, list_means
from kvbench.dashboard.packed import pack_drift, pack_retention
from kvbench.dashboard.pool import Pool
from kvbench.dashboard.published_tables import list_tables
from kvbench.dashboard.run_samples import SamplesCache, read_added
from kvbench.dashboard.samples import list_samples
from kvbench.eval.protocol.intervals import NORMAL_CLUSTERS, SEED, find_quantile
from kvbench.eval.protocol.ranges import find_range
from kvbench.eval.text.full_cache import TASKS
from kvbench.report.code_notes import find_changes, name_origin
from kvbench.report.conditions import group_conditions
from kvbench.report.drifts import Drifts
from kvbench.report.figures.method_styles import COLOURS, DARK_COLOURS, choose_styles
from kvbench.report.full_scores import explain_mark
from kvbench.report.runs_table import SEED_COLUMNS, list_metrics, name_methods
from kvbench.report.seeds import find_seeds, is_calibrated
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.repeat import write_command
from kvbench.runs.record.results import WELL_USED, Results
from kvbench.version import __version__

QUANTILES, MIN_FREEDOM = 400, 0.25
"""Number of steps of the table of quantiles, and its minimum degrees of freedom."""
CONTACT_SHEET = "contact_sheet.png"


def make_document(
    runs_dir: Path, chosen: Sequence[Path] | None = None, added: LoadedDatasets = NO_DATASETS
) -> dict[str, Any]:
    """Return the finished runs below `runs_dir` with their values, other runs by name and state, and sweeps.

    With `chosen`, folders of runs below `runs_dir`, only these are read, and nothing is cached for the next page. Runs
    of the datasets `added` follow; they compete for best values only with runs of their own dataset, and are not joined
    over seeds.

    `shared` holds values that runs reference by index: sections of configurations, prompts and texts. `means` are the
    rows of runs that differ only in seeds. `quantiles` and `generator` are the inputs of intervals of differences.
    """
    folders, pool, cache = find_folders(runs_dir, chosen), Pool(), SamplesCache(runs_dir)
    finished = {**folders.finished, **{folder: entry.results for folder, entry in added.entries.items()}}
    local, runs = list(folders.finished.values()), list(finished.values())
    labels = name_methods(runs, left_out=SEED_COLUMNS)
    conditions = _find_conditions(local, added, runs_dir)
    indices = {folder: index for index, folder in enumerate(finished)}
    read = {folder: cache.read(folder, run) for folder, run in folders.finished.items()}
    read |= {folder: read_added(folder, entry) for folder, entry in added.entries.items()}
    samples = list_samples(finished, read, pool)
    drifts = Drifts(runs_dir)
    described = [
        _describe_run(folder, run, label, indices, pool)
        | {"folder": relate(folder, runs_dir), "samples": samples[folder]}
        | {"conditions": conditions[id(run)]}
        | _describe_added(added.entries.get(folder), samples[folder], runs_dir)
        | {"drift": None if folder in added.entries else pack_drift(drifts, run, pool)}
        for (folder, run), label in zip(finished.items(), labels, strict=True)
    ]
    sweeps = find_sweeps(runs_dir) if chosen is None else ()
    means = list_means(local, runs_dir)
    if chosen is None:
        cache.save()
        drifts.save()
    generator = np.random.default_rng(SEED).bit_generator.state["state"]
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "metrics": _describe_metrics(runs),
        "failed": explain_mark(*TASKS),
        "wellUsed": WELL_USED,
        "quantiles": _tabulate_quantiles(),
        "generator": {name: str(generator[name]) for name in ("state", "inc")},  # integers of 128 bits
        "palette": {"light": COLOURS, "dark": DARK_COLOURS},
        "styles": {
            label: {"colour": COLOURS.index(colour), "marker": marker}
            for label, (colour, marker, _) in choose_styles(sorted(set(labels))).items()
        },
        "runs": described,
        "means": means,
        "published": list_tables(runs),
        "sweeps": [asdict(one) for one in sweeps if one.finished < one.jobs],
        "sweepRuns": _list_sweep_runs(sweeps, folders.finished, runs_dir),
        "unfinished": [asdict(one) for one in folders.unfinished],
        "damaged": [asdict(one) for one in (*folders.damaged, *added.left_out)],
        "earlier": folders.earlier,
        "shared": pool.values,
    }


def _find_conditions(local: Sequence[Results], added: LoadedDatasets, runs_dir: Path) -> dict[int, str]:
    """Return the name of each run's conditions by `id(run)`; for runs of a dataset it begins with its folder."""
    sets: dict[str, list[Results]] = {"": list(local)}
    for folder, entry in added.entries.items():
        sets.setdefault(f"{relate(folder.parents[1], runs_dir)}: ", []).append(entry.results)
    return {
        id(run): f"{name}{where}"
        for name, runs in sets.items()
        for where, alike in group_conditions(runs).items()
        for run in alike
    }


def _describe_added(run: AddedRun | None, samples: Mapping[str, object], runs_dir: Path) -> dict[str, object]:
    """Return the entries of a dataset's run alone: name of the dataset, folder of the samples, and verdict."""
    if run is None:
        return {}
    return {
        "dataset": run.dataset,
        "samples": {**samples, "folder": relate(run.samples, runs_dir)},
        "verified": None if run.checked is None else asdict(run.checked),
    }


def _describe_metrics(runs: list[Results]) -> dict[str, dict[str, object]]:
    """Return the shared fields of each metric that has a value in some run, in the order of tables."""
    first = {name: metric for run in reversed(runs) for name, metric in run.metrics.items()}
    names = list_metrics(runs, details=True)
    return {
        name: {key: getattr(first[name], key) for key in SHARED_FIELDS} | {"range": _find_ends(name)}
        for name in names
    }


def _find_ends(name: str) -> tuple[float, float] | None:
    """Return the minimum and maximum of a metric's range; None if it is unbounded."""
    ends = find_range(name)
    return ends if ends is not None and all(map(math.isfinite, ends)) else None


def _list_sweep_runs(
    sweeps: Sequence[Sweep], finished: Mapping[Path, Results], runs_dir: Path
) -> dict[str, list[int]]:
    """Return the indices of the runs of each sweep and of their references, by the sweep's name."""
    names = {folder.relative_to(runs_dir).as_posix(): index for index, folder in enumerate(finished)}
    runs = list(finished.values())
    listed: dict[str, set[int]] = {}
    for sweep in sweeps:
        members = {names[name] for name in sweep.runs if name in names}
        references = {f"{runs[index].model}/{runs[index].reference}" for index in members}
        if members:
            known = {names[name] for name in references if name in names}
            listed.setdefault(sweep.name, set()).update(members, known)
    return {name: sorted(indices) for name, indices in listed.items()}


def _tabulate_quantiles() -> dict[str, object]:
    """Return the logarithms of Student's 97.5 % quantiles by the inverse of the degrees of freedom.

    Linear interpolation between them is accurate to four digits.
    """
    first = 1 / (NORMAL_CLUSTERS - 1.001)  # from `NORMAL_CLUSTERS` on it is the normal distribution's
    step = (1 / MIN_FREEDOM - first) / QUANTILES
    inverses = [first + index * step for index in range(QUANTILES + 1)]
    return {
        "first": first,
        "step": step,
        "logarithms": [round(math.log(find_quantile(1 / inverse + 1)), 9) for inverse in inverses],
    }


def _describe_run(
    folder: Path, run: Results, label: str, indices: Mapping[Path, int], pool: Pool
) -> dict[str, object]:
    return {
        "model": run.model_label,
        "prompts": run.prompts_label,
        "method": run.method,
        "label": label,
        "budget": run.memory.budget,
        "unit": run.memory.budget_unit,
        "n": run.n,
        "reference": None if run.reference is None else indices.get(folder.parent / run.reference),
        "seeds": find_seeds(run),
        "memory": vars(run.memory),
        "latency": vars(run.latency),
        "metrics": describe_metrics(run),
        "config": {key: pool.add(value) for key, value in run.config.items()},
        "calibrated": is_calibrated(run),
        "changes": find_changes(run),
        "origins": "; ".join(map(name_origin, list_origins(run.provenance))),
        "command": write_command(run),
        "finished": run.finished,
        "sheet": (folder / CONTACT_SHEET).is_file(),
        "retention": pack_retention(folder),
    }
