"""Every method against one of them at the same budget: paired differences of finished runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench import report
from kvbench.eval.compare import differences
from kvbench.published import Run, setting
from kvbench.runs import write_whole


def rows_against(runs: Sequence[Run], runs_dir: Path, against: str) -> list[report.Row]:
    """One row per run that has a partner: the same model, reference, budget and number of samples, method `against`."""
    partners = {_place(run): run for run in runs if run["method"] == against}
    found = []
    for run in sorted(runs, key=lambda run: (*map(str, _place(run)), str(run["method"]))):
        partner = partners.get(_place(run))
        if partner is None or run is partner or run["reference"] is None:
            continue
        scores = differences(_folder(run, runs_dir), _folder(partner, runs_dir))
        row = {
            "model": report.model_label(run),
            "method": str(run["method"]),
            "budget": f"{_place(run)[2]:.4g}",
        }
        for name in report.COLUMNS:
            if name in scores:
                score = scores[name]
                entry = {"value": score.value, "ci95": score.ci95}
                row |= report.metric_cells(name, entry, "range")
        found.append(row)
    names = list(dict.fromkeys(name for row in found for name in row))
    return [{name: row.get(name, "-") for name in names} for row in found]


def show_against(console: Console, runs: Sequence[Run], runs_dir: Path, against: str) -> None:
    """Prints the differences and writes them as Markdown into runs_dir/report-against-<method>.md."""
    rows = rows_against(runs, runs_dir, against)
    if not rows:
        console.print(
            f"against={against}: no two finished runs differ in their method alone", highlight=False
        )
        return
    title = f"difference to {against} at the same budget, same prompts and noise [95 % interval]"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(escape(name), overflow="fold", no_wrap=name == "method")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row.values()))
    console.print(table)
    path = runs_dir / f"report-against-{against}.md"
    write_whole(path, f"{title}\n\n{report.markdown(rows)}".encode())
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


def _place(run: Run) -> tuple[str, str, float, int]:
    memory = run["memory"]
    assert isinstance(memory, Mapping)
    share = round(float(memory["budget_tokens"]) / float(memory["full_tokens"]), 6)
    return str(setting(run, "model.name")), str(run["reference"]), share, int(str(run["n"]))


def _folder(run: Run, runs_dir: Path) -> Path:
    return runs_dir / str(setting(run, "model.name")) / str(run["run"])
