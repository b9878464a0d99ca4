"""The figures of a report: quality against memory, time against batch size, and what heads kept."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.report.ablations import is_full
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

MAPPED = 0.1
"""Share of the full cache near which a method's map of what it kept is drawn: the papers' middle budget."""


def draw_figures(runs_dir: Path, runs: Sequence[Results], place: Path) -> list[Path]:
    """Draw finished runs and profiles, and return the PNG files, each with an SVG beside it.

    Args:
        runs_dir: where runs' own folders and profiles are.
        runs: finished ones.
        place: folder of the figures.

    Raises:
        ConfigError: a profile, or what a run kept, is damaged.
    """
    return [
        *draw_fidelity(place, runs, "fidelity"),
        *draw_latency(runs_dir, place),
        *draw_kept(runs_dir, runs, place),
    ]


def draw_fidelity(place: Path, runs: Sequence[Results], name: str) -> list[Path]:
    """Draw every metric against measured memory, one figure per model that has a method at two budgets."""
    from kvbench.report import plots, styles  # take long to import

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
    from kvbench.report import latency_plots, styles  # take long to import

    profiles = latency_plots.read_profiles(runs_dir)
    return [
        styles.save(
            latency_plots.draw_latencies(curves, where),
            place / ("latency.png" if len(profiles) == 1 else f"latency-{slug(where)}.png"),
        )
        for where, curves in profiles.items()
    ]


def draw_kept(runs_dir: Path, runs: Sequence[Results], place: Path) -> list[Path]:
    """Draw what every head kept, for the run of each model and method whose budget is nearest to a tenth."""
    from kvbench.report import retention_plots, styles  # take long to import

    chosen: dict[tuple[str, str], Results] = {}
    for run in sorted(runs, key=lambda run: abs(run.memory.budget - MAPPED)):
        if not is_full(run):
            chosen.setdefault((run.model, run.method), run)
    paths = []
    for (_, method), run in sorted(chosen.items()):
        retention = read_retention(runs_dir / run.model / run.run)
        if retention is not None:
            title = f"{run.model_label}, {method}: measured memory {100 * run.memory.peak:.3g} % of the full cache"
            figure = retention_plots.draw_retention(retention, title)
            paths.append(styles.save(figure, place / f"retention-{slug(run.run)}.png"))
    return paths
