"""Figures of a report: metrics against memory, divergence over positions, time against batch size, retention maps."""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.report.ablations import is_full
from kvbench.report.drifts import group_drifts
from kvbench.report.seeds import count_seeds, find_seeds, list_members, name_seeds
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

NOT_INSTALLED = 'figures: matplotlib is not installed; pip install "kvbench[plots]"'
"""Line in place of figures without the `plots` extra."""
MAP_BUDGET = 0.1
"""Budget, as a share of the full cache, whose retention map is drawn: the papers' middle budget."""


def can_draw() -> bool:
    """Return whether the `plots` extra is installed."""
    return find_spec("matplotlib") is not None


def draw_figures(
    runs_dir: Path, runs: Sequence[Results], place: Path, metrics: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """Draw finished runs and profiles into the folder `place`.

    `metrics` are the metrics to draw; without any, all.

    Returns:
        PNG files, each also written as SVG and PDF, and a line with the reason for each figure that cannot be drawn.
    """
    if not can_draw():
        return [], [NOT_INSTALLED]
    paths: list[Path] = []
    left_out: list[str] = []
    seeded = len({name_seeds(run)[0] for run in runs}) > 1
    maps = [
        (f"map of {run.run}", partial(draw_map, runs_dir, run, place, seeded=seeded))
        for run in choose_mapped(runs)
    ]
    for name, draw in (
        ("fidelity", partial(draw_fidelity, place, runs, "fidelity", metrics)),
        ("drift", partial(draw_drift, runs_dir, place, runs)),
        ("latency", partial(draw_latency, runs_dir, place)),
        *maps,
    ):
        try:
            paths += draw()
        except (ConfigError, ValueError, ArithmeticError, LookupError) as error:
            left_out.append(f"{name}: {' '.join(str(error).split())}")
    return paths, left_out


def draw_fidelity(place: Path, runs: Sequence[Results], name: str, metrics: Sequence[str] = ()) -> list[Path]:
    """Draw metrics against measured memory, for each model that has a method at two budgets.

    Of many methods there are several figures, `<name>-2.png` and so on.
    """
    from kvbench.report.figures import plots, styles  # take long to import

    models, paths = sorted({run.model_label for run in runs}), []
    for model in models:
        own = [run for run in runs if run.model_label == model]
        prompts = ", ".join(sorted({run.prompts_label for run in own}))
        title = f"{model} ({prompts}): metrics against measured memory, 95 % bands"
        stem = name if len(models) == 1 else f"{name}-{slug(model)}"
        for number, figure in enumerate(plots.draw_metrics(own, title + describe_joined(own), metrics), 1):
            part = f"-{number}" if number > 1 else ""
            paths.append(styles.save(figure, place / f"{stem}{part}.png"))
    return paths


def draw_drift(runs_dir: Path, place: Path, runs: Sequence[Results]) -> list[Path]:
    """Draw the divergence over positions of runs that read texts, for each model and set of prompts.

    Of several runs of a method at a budget that differ in nothing that is shown, the last one is drawn. Of many
    methods there are several figures, `drift-2.png` and so on.
    """
    if not (groups := group_drifts(runs_dir, runs)):
        return []
    from kvbench.report.figures import drift_plots, styles  # take long to import

    paths = []
    for (model, prompts, _), drifts in groups.items():
        title = f"{model} ({prompts}): divergence from the full cache over positions, 95 % bands"
        stem = "drift" if len(groups) == 1 else f"drift-{slug(f'{model} {prompts}')}"
        for number, figure in enumerate(drift_plots.draw_drifts(drifts, title), 1):
            part = f"-{number}" if number > 1 else ""
            paths.append(styles.save(figure, place / f"{stem}{part}.png"))
    return paths


def describe_joined(runs: Sequence[Results]) -> str:
    """Return the end of a title that says over what points are means; empty if over nothing."""
    noises, calibrations = (max(counts) for counts in zip(*map(count_seeds, runs), strict=True))
    kinds = [*(["seeds"] if noises > 1 else []), *(["calibrations"] if calibrations > 1 else [])]
    return f", means over {' and '.join(kinds)}" if kinds else ""


def draw_latency(runs_dir: Path, place: Path) -> list[Path]:
    """Draw time against batch size, for each profiled model and device.

    Of many methods there are several figures, `latency-2.png` and so on.
    """
    from kvbench.report.figures import latency_plots, plots, styles  # take long to import

    profiles, paths = latency_plots.read_profiles(runs_dir), []
    for where, curves in profiles.items():
        stem = "latency" if len(profiles) == 1 else f"latency-{slug(where)}"
        for number, names in enumerate(plots.split_methods(sorted(curves)), 1):
            figure = latency_plots.draw_latencies({name: curves[name] for name in names}, where)
            part = f"-{number}" if number > 1 else ""
            paths.append(styles.save(figure, place / f"{stem}{part}.png"))
    return paths


def choose_mapped(runs: Sequence[Results]) -> list[Results]:
    """Return the run of each model and compressing method whose budget is nearest to `MAP_BUDGET`."""
    chosen: dict[tuple[str, str], Results] = {}
    for run in sorted(runs, key=lambda run: abs(run.memory.budget - MAP_BUDGET)):
        if not is_full(run):
            chosen.setdefault((run.model, run.method), run)
    return [run for _, run in sorted(chosen.items())]


def draw_map(runs_dir: Path, run: Results, place: Path, *, seeded: bool = False) -> list[Path]:
    """Draw the retention map of a run, the mean over seeds of several; nothing if it was not recorded.

    If the sources of a map differ between seeds, the first seed's map is drawn. If `seeded`, the title of a single
    run's map names its seed.
    """
    from kvbench.report.figures import retention_plots, styles  # take long to import

    recorded = [read_retention(runs_dir / one.model / one.run) for one in list_members(run)]
    retentions = [one for one in recorded if one is not None]
    if not retentions:
        return []
    alike = [one for one in retentions if one.sources == retentions[0].sources]
    seed = f", seed {find_seeds(list_members(run)[0])[0]}" if seeded else ""
    joined = f", mean over {len(alike)} runs" if len(alike) > 1 else seed
    memory = f"measured memory {100 * run.memory.peak:.3g} % of the full cache"
    title = f"{run.model_label}, {run.method}: {memory}{joined}"
    figure = retention_plots.draw_retention(retention_plots.average_maps(alike), title)
    return [styles.save(figure, place / f"retention-{slug(run.run)}.png")]
