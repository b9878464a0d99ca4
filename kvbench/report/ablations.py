"""Ablations: runs that differ in one setting."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvbench.data.flatten import Value, list_settings
from kvbench.report.conditions import find_conditions, is_full
from kvbench.report.memory import name_percent
from kvbench.report.runs_table import SEED_COLUMNS, find_metrics
from kvbench.report.seeds import name_count, name_seeds
from kvbench.report.tables import Row
from kvbench.runs.record.results import Results


@dataclass(frozen=True)
class Ablation:
    """Runs of one model, prompts, method and budget that differ in one setting, which is not a seed.

    Attributes:
        setting: dotted path in the configuration.
        runs: a run for each value, ascending.
        others: other settings in which runs of the method differ, with their values in `runs`.
    """

    setting: str
    runs: tuple[Results, ...]
    others: Mapping[str, Value]


def find_ablations(runs: Sequence[Results]) -> list[Ablation]:
    """Return the ablations among finished runs: two or more values of a setting, all other settings equal."""
    groups: dict[Hashable, list[Results]] = {}
    for run in runs:
        if not is_full(run):
            key = find_conditions(run), run.noise, run.method, run.memory.allowed
            groups.setdefault(key, []).append(run)
    return [ablation for group in groups.values() for ablation in _split_group(group)]


def _split_group(runs: Sequence[Results]) -> Iterator[Ablation]:
    """Yield the ablations among runs of one method and budget."""
    settings = [_list_settings(run) for run in runs]
    names = dict.fromkeys(name for values in settings for name in values)
    varied = [name for name in names if len({_sort_key(values.get(name)) for values in settings}) > 1]
    for name in (name for name in varied if name not in SEED_COLUMNS):
        by_others: dict[tuple[tuple[str, Value], ...], dict[Value, Results]] = {}
        for run, values in zip(runs, settings, strict=True):
            others = tuple((other, values.get(other)) for other in varied if other != name)
            by_others.setdefault(others, {}).setdefault(values.get(name), run)
        for others, by_value in by_others.items():
            if len(by_value) > 1:
                ordered = tuple(by_value[value] for value in sorted(by_value, key=_sort_key))
                yield Ablation(name, ordered, dict(others))


def make_ablation_rows(ablation: Ablation) -> list[Row]:
    """Return a row for each value of the setting with memory and metrics, laid out as HeatKV's Table 3."""
    return [
        {
            ablation.setting: str(_list_settings(run).get(ablation.setting)),
            "peak %": f"{100 * run.memory.peak:.2f}",
            **metrics,
        }
        for run, metrics in zip(ablation.runs, find_metrics(ablation.runs), strict=True)
    ]


def name_ablation(ablation: Ablation) -> str:
    """Return a title that names the runs of an ablation and its setting."""
    run = ablation.runs[0]
    also = "".join(f", {name}={value}" for name, value in ablation.others.items())
    return (
        f"{run.model_label}, {run.method} at {name_percent(run.memory)}{also} "
        f"({run.prompts_label}, n = {name_count(run)}): {ablation.setting}"
    )


def _list_settings(run: Results) -> dict[str, Value]:
    """Return the settings in which runs of one method and budget may differ, and their seeds."""
    settings = {name: value for name, value in list_settings(run).items() if not name.startswith("prompts.")}
    settings.pop("calibrate.seed", None)
    return settings | {"cache_dtype": run.stored} | dict(zip(SEED_COLUMNS, name_seeds(run), strict=True))


def _sort_key(value: Value) -> tuple[bool, float, str]:
    """Return a key that sorts numbers before strings."""
    return (False, float(value), str(value)) if isinstance(value, int | float) else (True, 0.0, str(value))
