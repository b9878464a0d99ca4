"""Runs that differ in one setting, as a paper's table of an ablation has them, and which of them is best."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvbench.data.flatten import SECTIONS, Value, flatten_run
from kvbench.eval.protocol.scores import Metric
from kvbench.report.memory import name_percent
from kvbench.report.runs_table import find_metric, list_metrics
from kvbench.report.tables import Row
from kvbench.runs.record.results import Results


@dataclass(frozen=True)
class Ablation:
    """Runs of one model, prompts, method and budget that differ in one setting alone.

    Attributes:
        setting: its dotted path in the configuration.
        runs: one for each of its values, ascending.
        others: the further settings in which runs of the method differ, and their values here.
    """

    setting: str
    runs: tuple[Results, ...]
    others: Mapping[str, Value]


def find_ablations(runs: Sequence[Results]) -> list[Ablation]:
    """Return what finished runs have of ablations: two or more values of a setting, all other settings alike."""
    groups: dict[Hashable, list[Results]] = {}
    for run in runs:
        if not is_full(run):
            place = run.model_label, run.prompts_label, run.n, run.method, run.memory.allowed
            groups.setdefault(place, []).append(run)
    return [ablation for group in groups.values() for ablation in _split_group(group)]


def _split_group(runs: Sequence[Results]) -> Iterator[Ablation]:
    """Yield the ablations among runs of one method and budget."""
    settings = [_list_settings(run) for run in runs]
    names = dict.fromkeys(name for one in settings for name in one)
    varied = [name for name in names if len({_sort_key(one.get(name)) for one in settings}) > 1]
    for name in varied:
        parts: dict[tuple[tuple[str, Value], ...], dict[Value, Results]] = {}
        for run, one in zip(runs, settings, strict=True):
            others = tuple((other, one.get(other)) for other in varied if other != name)
            parts.setdefault(others, {}).setdefault(one.get(name), run)
        for others, part in parts.items():
            if len(part) > 1:
                yield Ablation(
                    name, tuple(part[value] for value in sorted(part, key=_sort_key)), dict(others)
                )


def make_ablation_rows(ablation: Ablation) -> list[Row]:
    """Return a row for each value of the setting: the value, memory, and metrics, as HeatKV's Table 3 has them."""
    metrics = list_metrics(ablation.runs)
    return [
        {
            ablation.setting: str(_list_settings(run).get(ablation.setting)),
            "peak %": f"{100 * run.memory.peak:.2f}",
            **{name: find_metric(run, name) for name in metrics},
        }
        for run in ablation.runs
    ]


def name_ablation(ablation: Ablation) -> str:
    """Say what an ablation varies, and what of."""
    run = ablation.runs[0]
    also = "".join(f", {name}={value}" for name, value in ablation.others.items())
    return (
        f"{run.model_label}, {run.method} at {name_percent(run.memory)}{also} "
        f"({run.prompts_label}, n = {run.n}): {ablation.setting}"
    )


def is_full(run: Results) -> bool:
    """Return whether a run compresses nothing: the reference, or a bound of it."""
    return run.method.split(",")[0] == "full"


def find_best(rows: Sequence[Row], groups: Sequence[Hashable]) -> set[tuple[int, str]]:
    """Return the cells (row, column) of the best value of each metric within a group, by the metric's own direction.

    Several are best if they are equal in the digits that are shown; a group in which all are has no best.

    Args:
        rows: of one table.
        groups: of each row; None for one that does not compete.
    """
    best: set[tuple[int, str]] = set()
    for column in rows[0] if rows else ():
        competing: dict[Hashable, dict[int, float]] = {}
        for place, (row, group) in enumerate(zip(rows, groups, strict=True)):
            cell = row[column]
            if group is not None and isinstance(cell, Metric) and cell.value is not None:
                sign = 1 if cell.better == "higher" else -1
                competing.setdefault(group, {})[place] = sign * round(cell.value, cell.digits)
        for values in competing.values():
            if len(set(values.values())) > 1:
                best |= {(place, column) for place, value in values.items() if value == max(values.values())}
    return best


def _list_settings(run: Results) -> dict[str, Value]:
    """Return the settings in which runs of one method and budget may differ."""
    chosen = (*(f"{section}." for section in SECTIONS if section != "prompts"), "seed", "cache_dtype")
    return {name: value for name, value in flatten_run(run).items() if name.startswith(chosen)}


def _sort_key(value: Value) -> tuple[bool, float, str]:
    """Order numbers before words, and both in their own order."""
    number = isinstance(value, int | float)
    return not number, float(value) if isinstance(value, int | float) else 0.0, str(value)
