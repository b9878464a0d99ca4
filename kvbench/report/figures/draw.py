"""The figures of a report: quality against memory, time against batch size, and what heads kept."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.report.ablations import is_full
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

MAPPED = 0.1
"""Share of the full cache near which a method's map of what it kept is drawn: the papers' middle budget."""


def draw_figures(runs_dir: Path, runs: Sequence[Results], place: Path) -> tuple[list[Path], list[str]]:
    """Draw finished runs and profiles.

    Args:
        runs_dir: where runs' own folders and profiles are.
        runs: finished ones.
        place: folder of the figures.

    Returns:
        PNG files, each with an SVG beside it, and a line for each figure that cannot be drawn, with the reason.
    """
    paths: list[Path] = []
    left_out: list[str] = []
    kept = [(f"map of {run.run}", partial(draw_kept, runs_dir, run, place)) for run in choose_mapped(runs)]
    for name, draw in (
        ("fidelity", partial(draw_fidelity, place, runs, "fidelity")),
        ("latency", partial(draw_latency, runs_dir, place)),
        *kept,
    ):
        try:
            paths += draw()
        except (ConfigError, ValueError, ArithmeticError, LookupError) as error:
            left_out.append(f"{name}: {' '.join(str(error).split())}")
    return paths, left_out


def draw_fidelity(place: Path, runs: Sequence[Results], name: str) -> list[Path]:
    """Draw every metric against measured memory, one figure per model that has a method at two budgets."""
    from kvbench.report.figures import (
        plots,
        styles,  # take long to import
    )

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
    """Draw time against batch size, one figure per model and device that was profiled."""
    from kvbench.report.figures import (
        latency_plots,
        styles,  # take long to import
    )

    profiles = latency_plots.read_profiles(runs_dir)
    return [
        styles.save(
            latency_plots.draw_latencies(curves, where),
            place / ("latency.png" if len(profiles) == 1 else f"latency-{slug(where)}.png"),
        )
        for where, curves in profiles.items()
    ]


def choose_mapped(runs: Sequence[Results]) -> list[Results]:
    """Return the run of each model and compressing method whose budget is nearest to a tenth."""
    chosen: dict[tuple[str, str], Results] = {}
    for run in sorted(runs, key=lambda run: abs(run.memory.budget - MAPPED)):
        if not is_full(run):
            chosen.setdefault((run.model, run.method), run)
    return [run for _, run in sorted(chosen.items())]


def draw_kept(runs_dir: Path, run: Results, place: Path) -> list[Path]:
    """Draw what every head of a run kept; nothing of a run that has not recorded it."""
    from kvbench.report.figures import (
        retention_plots,
        styles,  # take long to import
    )

    retention = read_retention(runs_dir / run.model / run.run)
    if retention is None:
        return []
    title = (
        f"{run.model_label}, {run.method}: measured memory {100 * run.memory.peak:.3g} % of the full cache"
    )
    figure = retention_plots.draw_retention(retention, title)
    return [styles.save(figure, place / f"retention-{slug(run.run)}.png")]
