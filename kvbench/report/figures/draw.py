"""Figures of a report: metrics against memory, time against batch size, and retention maps."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.report.ablations import is_full
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

MAP_BUDGET = 0.1
"""Budget, as a share of the full cache, whose retention map is drawn: the papers' middle budget."""


def draw_figures(runs_dir: Path, runs: Sequence[Results], place: Path) -> tuple[list[Path], list[str]]:
    """Draw finished runs and profiles into the folder `place`.

    Returns:
        PNG files, each also written as SVG, and a line with the reason for each figure that cannot be drawn.
    """
    paths: list[Path] = []
    left_out: list[str] = []
    maps = [(f"map of {run.run}", partial(draw_map, runs_dir, run, place)) for run in choose_mapped(runs)]
    for name, draw in (
        ("fidelity", partial(draw_fidelity, place, runs, "fidelity")),
        ("latency", partial(draw_latency, runs_dir, place)),
        *maps,
    ):
        try:
            paths += draw()
        except (ConfigError, ValueError, ArithmeticError, LookupError) as error:
            left_out.append(f"{name}: {' '.join(str(error).split())}")
    return paths, left_out


def draw_fidelity(place: Path, runs: Sequence[Results], name: str) -> list[Path]:
    """Draw metrics against measured memory, a figure for each model that has a method at two budgets."""
    from kvbench.report.figures import plots, styles  # take long to import

    models, paths = sorted({run.model_label for run in runs}), []
    for model in models:
        own = [run for run in runs if run.model_label == model]
        prompts = ", ".join(sorted({run.prompts_label for run in own}))
        figure = plots.draw_metrics(own, f"{model} ({prompts}): metrics against measured memory, 95 % bands")
        if figure is not None:
            stem = name if len(models) == 1 else f"{name}-{slug(model)}"
            paths.append(styles.save(figure, place / f"{stem}.png"))
    return paths


def draw_latency(runs_dir: Path, place: Path) -> list[Path]:
    """Draw time against batch size, a figure for each profiled model and device."""
    from kvbench.report.figures import latency_plots, styles  # take long to import

    profiles = latency_plots.read_profiles(runs_dir)
    return [
        styles.save(
            latency_plots.draw_latencies(curves, where),
            place / ("latency.png" if len(profiles) == 1 else f"latency-{slug(where)}.png"),
        )
        for where, curves in profiles.items()
    ]


def choose_mapped(runs: Sequence[Results]) -> list[Results]:
    """Return the run of each model and compressing method whose budget is nearest to `MAP_BUDGET`."""
    chosen: dict[tuple[str, str], Results] = {}
    for run in sorted(runs, key=lambda run: abs(run.memory.budget - MAP_BUDGET)):
        if not is_full(run):
            chosen.setdefault((run.model, run.method), run)
    return [run for _, run in sorted(chosen.items())]


def draw_map(runs_dir: Path, run: Results, place: Path) -> list[Path]:
    """Draw the retention map of a run; nothing if the run did not record it."""
    from kvbench.report.figures import retention_plots, styles  # take long to import

    retention = read_retention(runs_dir / run.model / run.run)
    if retention is None:
        return []
    memory = f"measured memory {100 * run.memory.peak:.3g} % of the full cache"
    figure = retention_plots.draw_retention(retention, f"{run.model_label}, {run.method}: {memory}")
    return [styles.save(figure, place / f"retention-{slug(run.run)}.png")]
