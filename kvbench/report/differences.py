"""Paired differences between methods and one of them at the same budget."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.compare import compare_runs
from kvbench.report.runs_table import list_metrics
from kvbench.report.tables import Row, drop_columns, publish
from kvbench.runs.record.results import Results


def make_difference_rows(runs: Sequence[Results], runs_dir: Path, against: str) -> list[Row]:
    """Return a row per run that has a partner with the same model, reference, budget, unit and number of samples.

    `against` is the method of the partners, or the folder name of one run.

    Raises:
        ConfigError: no run has that method or name, or a run has several partners.
    """
    partners: dict[object, list[Results]] = {}
    for run in runs:
        if against in (run.method, run.run):
            partners.setdefault(_place(run), []).append(run)
    if not partners:
        methods = ", ".join(sorted({run.method for run in runs}))
        raise ConfigError(f"against={against}: no finished run has that method or name; there are {methods}")
    pairs = []
    for run in sorted(runs, key=lambda run: (*map(str, _place(run)), run.run)):
        chosen = partners.get(_place(run), [])
        if len(chosen) > 1:
            several = ", ".join(one.run for one in chosen)
            raise ConfigError(f"against={against}: matches several runs at one budget; name one of {several}")
        if chosen and run is not chosen[0] and run.reference is not None:
            pairs.append((run, compare_runs(_folder(run, runs_dir), _folder(chosen[0], runs_dir))))
    names = list_metrics([run for run, _ in pairs])
    compared = [name for name in names if any(name in metrics for _, metrics in pairs)]
    return [
        {"model": run.model_label, "run": run.run, **{name: metrics.get(name) for name in compared}}
        for run, metrics in pairs
    ]


def show_differences(
    console: Console, runs: Sequence[Results], runs_dir: Path, against: str, output: Path
) -> None:
    """Print the differences and write them into report-against-<method>.md of the folder `output`."""
    rows = make_difference_rows(runs, runs_dir, against)
    if not rows:
        console.print(f"against={against}: no two finished runs differ only in method", highlight=False)
        return
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    shown = rows if len(models) > 1 else drop_columns(rows, ["model"])
    what = f"difference to {against} at the same budget, same prompts and noise (with 95 % intervals)"
    path = output / f"report-against-{against}.md"
    publish(console, f"{', '.join(models)}: {what}", shown, 1 + (len(models) > 1), path)


def _place(run: Results) -> tuple[str, str, float, str, int]:
    return run.model, str(run.reference), *run.memory.allowed, run.n


def _folder(run: Results, runs_dir: Path) -> Path:
    return runs_dir / run.model / run.run
