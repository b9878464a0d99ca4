"""Figures of a report: metrics against memory, divergence over positions, time against batch size, retention maps."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.config import ConfigError
from kvbench.report.conditions import group_conditions, is_full
from kvbench.report.drifts import group_drifts
from kvbench.report.seeds import find_seeds, list_counts, list_members, list_varied, name_seeds
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

if TYPE_CHECKING:  # takes long to import
    from matplotlib.figure import Figure

NOT_INSTALLED = 'figures: matplotlib is not installed; pip install "kvbench[plots]"'
"""Line printed instead of figures without the `plots` extra."""
MAP_BUDGET = 0.1
"""Budget, as a share of the full cache, whose retention map is drawn: the papers' middle budget."""


def can_draw() -> bool:
    """Return whether the `plots` extra is installed."""
    return find_spec("matplotlib") is not None


def draw_figures(
    runs_dir: Path, runs: Sequence[Results], folder: Path, metrics: Sequence[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Draw finished runs and profiles of `runs_dir` into a folder; `metrics` as for `choose_metrics`.

    Returns:
        PNG files, each also written as SVG and PDF, and a line with the reason for each figure that cannot be drawn.
    """
    if not can_draw():
        return [], [NOT_INSTALLED]
    paths: list[Path] = []
    left_out: list[str] = []
    seeded = len({name_seeds(run)[0] for run in runs}) > 1
    maps = [
        (f"map of {run.run}", partial(draw_map, runs_dir, run, folder, seeded=seeded))
        for run in choose_mapped(runs)
    ]
    for name, draw in (
        ("fidelity", partial(draw_fidelity, folder, runs, "fidelity", metrics)),
        ("drift", partial(draw_drift, runs_dir, folder, runs)),
        ("latency", partial(draw_latency, runs_dir, folder)),
        *maps,
    ):
        try:
            paths += draw()
        except (ConfigError, ValueError, ArithmeticError, LookupError) as error:
            left_out.append(f"{name}: {' '.join(str(error).split())}")
    return paths, left_out


def draw_fidelity(
    folder: Path, runs: Sequence[Results], name: str, metrics: Sequence[str] | None = ()
) -> list[Path]:
    """Draw metrics against measured memory for each group of runs that share `find_conditions`.

    A group without a method at two budgets has no figure; many methods are divided among several figures.
    """
    from kvbench.report.figures import plots  # takes long to import

    figures, what = {}, "metrics against measured memory, 95 % bands"
    for where, members in group_conditions(runs).items():
        figures[where] = plots.draw_metrics(members, f"{where}: {what}{describe_joined(members)}", metrics)
    return save_groups(folder, name, figures)


def draw_drift(runs_dir: Path, folder: Path, runs: Sequence[Results]) -> list[Path]:
    """Draw the divergence of forced-decoding runs over positions for each group that shares `find_conditions`.

    Of runs with the same label and budget, the last is drawn; many methods are divided among several figures.
    """
    if not (groups := group_drifts(runs_dir, runs)):
        return []
    from kvbench.report.figures import lines  # takes long to import

    what = "divergence from the full cache over positions, 95 % bands"
    figures = {where: lines.draw_drifts(drifts, f"{where}: {what}") for where, drifts in groups.items()}
    return save_groups(folder, "drift", figures)


def describe_joined(runs: Sequence[Results]) -> str:
    """Return the end of a title that says over which seeds points are means; empty for single runs."""
    kinds = list_varied(runs)
    return f", means over {' and '.join(kinds)}: {', '.join(list_counts(runs))}" if kinds else ""


def draw_latency(runs_dir: Path, folder: Path) -> list[Path]:
    """Draw time against batch size for each profiled model, device and dtype of the cache, few methods per figure."""
    from kvbench.report.figures import lines, plots  # take long to import

    groups = {
        where: [
            lines.draw_latencies({name: curves[name] for name in names}, where)
            for names, _ in plots.split_methods(sorted(curves))
        ]
        for where, curves in lines.read_profiles(runs_dir).items()
    }
    return save_groups(folder, "latency", groups)


def save_groups(folder: Path, stem: str, groups: Mapping[str, Sequence["Figure"]]) -> list[Path]:
    """Save figures as `<stem>.png`, `<stem>-2.png` and so on; those of several groups as `<stem>-<group>.png`."""
    from kvbench.report.figures import styles  # takes long to import

    drawn, paths = {name: figures for name, figures in groups.items() if figures}, []
    for name, figures in drawn.items():
        start = stem if len(drawn) == 1 else f"{stem}-{slug(name)}"
        for number, figure in enumerate(figures, 1):
            paths.append(styles.save(figure, folder / f"{start}{f'-{number}' if number > 1 else ''}.png"))
    return paths


def choose_mapped(runs: Sequence[Results]) -> list[Results]:
    """Return the run of each model and compressing method with budget closest to `MAP_BUDGET` and most samples."""
    chosen: dict[tuple[str, str], Results] = {}
    for run in sorted(runs, key=lambda run: (abs(run.memory.budget - MAP_BUDGET), -run.n)):
        if not is_full(run):
            chosen.setdefault((run.model, run.method), run)
    return [run for _, run in sorted(chosen.items())]


def draw_map(runs_dir: Path, run: Results, folder: Path, *, seeded: bool = False) -> list[Path]:
    """Draw the retention map of a run, or the mean over its seeds; nothing if none was recorded.

    Maps with other sources than the first seed's are left out. If `seeded`, the title of a single map names its seed.
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
    title = f"{run.model_label} ({run.prompts_label}), n = {run.n}, {run.method}: {memory}{joined}"
    figure = retention_plots.draw_retention(retention_plots.average_maps(alike), title)
    return [styles.save(figure, folder / f"retention-{slug(run.run)}.png")]
