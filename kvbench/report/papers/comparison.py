"""Tables at the end of a sweep that compare measured with published numbers, and the paper's figure."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from kvbench.core.files import write_whole
from kvbench.report.ablations import is_full
from kvbench.report.document import BOLD, Section, describe_unused, find_group, is_roomy, write_latex
from kvbench.report.figures.draw import draw_fidelity
from kvbench.report.papers.printed import Claim
from kvbench.report.papers.published import (
    COSTS,
    TOLERANCE,
    PublishedTable,
    find_setting,
    model_of,
    parse_number,
    prompts_of,
)
from kvbench.report.papers.stability import rank_deviation
from kvbench.report.runs_table import find_metric, order_runs
from kvbench.report.tables import Cell, Row, drop_columns, print_rows, publish
from kvbench.runs.record.results import Results

MASS = "mass"
"""Tensor of the calibrations whose rankings are compared (`kvbench.methods.heatkv.scores`)."""


REFERENCES = ("random", "first_scales")
"""Methods that no paper has and that each has to beat."""


def make_rows(table: PublishedTable, runs: Sequence[Results]) -> list[Row]:
    """Return the rows of a table that a run belongs to: settings, then measured and published cells by metric.

    A metric that a run lacks is `skipped` or `failed` if it was asked for, `-` if not. What is measured with another
    detector or network than the paper's stands in a column under its own name, without a published one.
    """
    labels = _find_labels(table, runs)
    return [
        _list_settings(table, run, runs) | _list_cells(table, labels, where, run, runs)
        for where, run in _match(table, runs)
    ]


def make_section(table: PublishedTable, runs: Sequence[Results]) -> Section | None:
    """Return a table as a part of the report, what its rows have in common below it; None where no run belongs."""
    own = [run for _, run in _match(table, runs)]
    if not own:
        return None
    rows = make_rows(table, own)
    lead = list(_list_settings(table, own[0], own))
    same = [name for name in lead if len(rows) > 1 and len({str(row[name]) for row in rows}) == 1]
    alike = "".join(f", {name} {rows[0][name]}" for name in same)
    caption = f"{make_title(table, own)}{alike}. 95 % intervals. {BOLD}.{describe_unused(own)}"
    return Section(
        f"{table.name}: {table.title}", caption, drop_columns(rows, same), list(map(find_group, own))
    )


def _match(
    table: PublishedTable, runs: Sequence[Results]
) -> list[tuple[Mapping[str, tuple[str, ...]], Results]]:
    """Return the runs that belong to rows of a table, row after row, each with where in the table that is.

    Runs of `REFERENCES` that belong to none, and so have nothing published beside them, stand before the first one that
    they can be compared with.
    """
    matched = [(where, run) for where in table.rows() for run in runs if table.matches(where, run)]
    own = [run for _, run in matched]
    compressed = [run for run in own if not is_full(run)] or own
    for run in order_runs([run for run in runs if run.method in REFERENCES and run not in own]):
        near = next((other for other in compressed if _is_near(run, other)), None)
        if near is not None:
            matched.insert(next(i for i, (_, other) in enumerate(matched) if other is near), ({}, run))
    return matched


def _is_near(reference: Results, run: Results) -> bool:
    """Return whether a run of a reference's model and prompts held about as much, or compresses nothing at all."""
    alike = all(
        getattr(reference, name) == getattr(run, name) for name in ("model_label", "prompts_label", "n")
    )
    shares = (run.memory.budget, run.memory.peak)
    close = any(abs(reference.memory.budget - share) <= TOLERANCE * share for share in shares)
    return alike and (close or is_full(run))


def make_title(table: PublishedTable, runs: Sequence[Results]) -> str:
    """Say what was published on what, and what was measured on what."""
    models = sorted({run.model_label for run in runs})
    published = " / ".join(_find_labels(table, runs))
    measured = [*models, *sorted({run.prompts_label for run in runs})]
    if set(table.metrics) & set(COSTS):
        measured.append("batch " + ", ".join(map(str, sorted({run.latency.batch for run in runs}))))
    return f"{table.source}: {table.title}. Published: {published}, {table.data}; measured: {', '.join(measured)}"


def show_beside(console: Console, table: PublishedTable, runs: Sequence[Results], runs_dir: Path) -> None:
    """Print measured beside published, write both as Markdown into report-<table>.md, and draw the figure."""
    own = [run for _, run in _match(table, runs)]
    if not own:
        console.print(f"{table.name}: no finished run belongs to a row of this table", highlight=False)
        return
    title = f"{make_title(table, own)} (with 95 % intervals).{describe_unused(own)}"
    lead = len(_list_settings(table, own[0], own))
    publish(console, title, make_rows(table, own), lead, runs_dir / f"report-{table.name}.md")
    section = make_section(table, own)
    if section is not None:
        write_whole(runs_dir / f"report-{table.name}.tex", write_latex([section]))
    if table.figure == "fidelity":
        for path in draw_fidelity(runs_dir, runs, table.name):
            console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
    elif table.figure is not None:
        draw_steps(console, table, own, runs_dir)


def draw_steps(console: Console, table: PublishedTable, runs: Sequence[Results], runs_dir: Path) -> None:
    """Plot the cached tokens of each step into <table>.png, if some run recorded them."""
    from kvbench.report.figures import (
        step_plots,
        styles,  # take long to import
    )

    with_steps = [run for run in runs if run.steps]
    if not with_steps or table.figure is None:
        console.print(f"{table.name}: no run recorded its steps; set method.watch_lse=true", highlight=False)
        return
    title = ", ".join(sorted({f"{run.model_label}, {run.prompts_label}, n = {run.n}" for run in with_steps}))
    path = styles.save(step_plots.draw_steps(with_steps, table.figure, title), runs_dir / f"{table.name}.png")
    console.print(f"drawn: {path}", highlight=False, soft_wrap=True)


def show_stability(
    console: Console, table: PublishedTable, artifacts: Sequence[Path], sinks: int, model: str, runs_dir: Path
) -> None:
    """Print how far S-CAS ranks move over calibrations, write report-<table>.md and <table>.png.

    Args:
        console: where to print.
        table: the published one.
        artifacts: calibrations of one model; those of other kinds are passed over.
        sinks: leading scales that are never pruned and so have no ranking.
        model: its name.
        runs_dir: where the files go.
    """
    from kvbench.report.figures import (
        plots,
        styles,  # take long to import
    )

    masses = _load_masses(artifacts)
    if len(masses) < 2:
        console.print(
            f"{table.name}: needs two or more calibrations, there are {len(masses)}", highlight=False
        )
        return
    heads, deviation = masses[0].shape[0] * masses[0].shape[1], rank_deviation(masses)[sinks:]
    rows: list[Row] = [
        {
            "source scale": str(sinks + 1 + i),
            "deviation of a head's rank": f"{ranks:.3f}",
            f"% of {heads} heads": f"{100 * ranks / heads:.2f}",
        }
        for i, ranks in enumerate(deviation)
    ]
    [(theirs, [claim])] = table.models.items()
    printed = str(claim.cells["percent of heads"])
    bound = parse_number(printed.lstrip("< "))
    title = (
        f"{table.source}: {table.title}. Measured: {model}, {len(masses)} calibrations, worst "
        f"{100 * deviation.max() / heads:.2f} % of the heads; published: {theirs}, worst {printed} %"
    )
    publish(console, title, rows, 1, runs_dir / f"report-{table.name}.md")
    figure = plots.draw_stability(
        deviation,
        heads,
        sinks + 1,
        f"{model}: S-CAS rankings over {len(masses)} calibrations",
        None if bound is None else (bound, f"published worst case, {theirs}: {printed} %"),
    )
    path = styles.save(figure, runs_dir / f"{table.name}.png")
    console.print(f"drawn: {path}", highlight=False, soft_wrap=True)


def show_claims(
    console: Console, name: str, sources: Sequence[PublishedTable], claims: Sequence[Claim]
) -> None:
    """Print columns of memory or work that are worked out from shapes beside the published ones."""
    cited = "; ".join(dict.fromkeys(table.source for table in sources))
    rows: list[Row] = [
        {
            "model": claim.model,
            "row": claim.what,
            "published": claim.printed,
            "from shapes": claim.ours,
            "verdict": claim.verdict,
            "how": claim.how,
        }
        for claim in claims
    ]
    print_rows(console, f"{name} ({cited}): costs from shapes", rows, len(rows[0]))


def _find_labels(table: PublishedTable, runs: Sequence[Results]) -> tuple[str, ...]:
    return table.labels(sorted({r.model_label for r in runs}), sorted({r.prompts_label for r in runs}))


def _list_settings(table: PublishedTable, run: Results, runs: Sequence[Results]) -> dict[str, Cell]:
    row: dict[str, Cell] = {"model": run.model_label} if len({r.model_label for r in runs}) > 1 else {}
    row |= {"prompts": run.prompts_label} if len({r.prompts_label for r in runs}) > 1 else {}
    row |= {"method": run.method, "budget": run.memory.budget_text + "!" * is_roomy(run)}
    for key in (*table.fixed, *table.keys):
        if key not in row:
            value = find_setting(run, key)
            row[key.removeprefix("latency.").removeprefix("method.")] = "-" if value is None else str(value)
    return row


def _list_cells(
    table: PublishedTable,
    labels: Sequence[str],
    where: Mapping[str, tuple[str, ...]],
    run: Results,
    runs: Sequence[Results],
) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    names = " / ".join(labels) if len(labels) < 3 and not table.sources else "published"
    for metric in table.metrics:
        if metric in COSTS:
            cells[metric] = _format_cost(COSTS[metric](run))
        elif any(metric in r.metrics for r in runs):
            cells[metric] = find_metric(run, metric)
        cells[f"{metric}, {names}"] = _list_printed(table, labels, where, metric, run)
        cells |= {name: find_metric(run, name) for name in list_variants(metric, runs)}
    also = (name for name in table.also if name not in cells and any(name in r.metrics for r in runs))
    return cells | {name: find_metric(run, name) for name in also}


def _list_printed(
    table: PublishedTable,
    labels: Sequence[str],
    where: Mapping[str, tuple[str, ...]],
    metric: str,
    run: Results,
) -> str:
    """Return what the columns of a paper give for a row; of several sources, what each gives for the run's model."""
    cells = {label: table.cell(label, where, metric) for label in labels}
    if table.sources:
        own = {label: cell for label, cell in cells.items() if cell and model_of(label) == run.model_label}
        return ", ".join(f"{cell} ({prompts_of(label)})" for label, cell in own.items()) or "-"
    return " / ".join(cell or "-" for cell in cells.values()) if any(cells.values()) else "-"


def _format_cost(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def list_variants(metric: str, runs: Sequence[Results]) -> list[str]:
    """Return the runs' metrics that follow a metric's rules on a detector in brackets: geneval[scenes]/position."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return [name for name in names if name != metric and re.sub(r"\[[^]]*\]", "", name) == metric]


def _load_masses(paths: Sequence[Path]) -> list[Tensor]:
    found = []
    for path in dict.fromkeys(paths):
        with safe_open(path, framework="pt") as file:
            if MASS in file.keys():  # noqa: SIM118 (not a dict)
                found.append(file.get_tensor(MASS))
    return found
