"""The full cache's score beside an accuracy, and the mark of a task that the full cache itself fails."""

from collections.abc import Iterable, Mapping, Sequence

from kvbench.eval.text.full_cache import CHANGES, MIN_FULL_ACCURACY, RETRIEVED, RETRIEVED_FULL, TASKS
from kvbench.report.tables import Cell, format_number
from kvbench.runs.record.results import Results

COLUMN = "{}, full cache"
"""Name of the column of the full cache's score beside an accuracy."""
FAILED = "‡"
"""Mark of a score of the full cache below `MIN_FULL_ACCURACY`."""


def explain_mark(*names: str) -> str:
    """Return a sentence that explains `FAILED` for tasks with the metrics `names`."""
    return (
        f"{FAILED}: the full cache itself fails the task ({' or '.join(names)} below {MIN_FULL_ACCURACY}), so that the "
        "values do not show what a method loses"
    )


def find_full(run: Results, name: str) -> float | None:
    """Return the full cache's accuracy `name` on a run's samples; None for another metric, or if it is not known."""
    values = {key: metric.value for key, metric in run.metrics.items()}
    if name == RETRIEVED:
        return values.get(RETRIEVED_FULL)
    if name not in CHANGES:
        return None
    value, change = values.get(name), 0.0 if run.reference is None else values.get(CHANGES[name])
    return None if value is None or change is None else value - change


def is_failed(run: Results, name: str) -> bool:
    """Return whether a metric is one of `TASKS`, and the full cache's is below `MIN_FULL_ACCURACY`."""
    full = find_full(run, name)
    return name in TASKS and full is not None and full < MIN_FULL_ACCURACY


def write_full(run: Results, name: str) -> str | None:
    """Return the full cache's score with its mark; None if it is not known."""
    full = find_full(run, name)
    if full is None:
        return None
    return format_number(full, run.metrics[name].digits) + FAILED * is_failed(run, name)


def list_columns(runs: Sequence[Results], cells: Sequence[Mapping[str, Cell]]) -> list[dict[str, Cell]]:
    """Return the metric cells of runs, with the full cache's score after each accuracy for which some run knows it."""
    known = {name for run in runs for name in run.metrics if find_full(run, name) is not None}
    rows: list[dict[str, Cell]] = [{} for _ in runs]
    for run, metrics, row in zip(runs, cells, rows, strict=True):
        for name, cell in metrics.items():
            row[name] = cell
            if name in known:
                row[COLUMN.format(name)] = write_full(run, name)
    return rows


def describe_failed(rows: Iterable[Results]) -> str:
    """Return a sentence on the tasks that the full cache itself fails, with its scores; empty if there are none."""
    failed = [(name, run) for run in rows for name in TASKS if is_failed(run, name)]
    tasks = [f"{run.model_label}, {run.prompts_label}: {write_full(run, name)}" for name, run in failed]
    names = dict.fromkeys(name for name, _ in failed)
    return f"{explain_mark(*names)} ({'; '.join(dict.fromkeys(tasks))})." if failed else ""
