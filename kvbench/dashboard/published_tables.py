"""Published tables with a row that matches a run, for the page's comparison with measured values."""

from collections.abc import Sequence

from kvbench.report.papers.comparison import find_labels, list_variants
from kvbench.report.papers.published import COSTS, PublishedTable, find_setting, load
from kvbench.runs.record.results import Results


def list_tables(runs: Sequence[Results]) -> list[dict[str, object]]:
    """Return the tables that match a run; their rows hold the indices of the run and of the printed row."""
    made = (_make_table(table, runs) for table in load().values())
    return [entry for entry in made if entry["rows"]]


def _make_table(table: PublishedTable, runs: Sequence[Results]) -> dict[str, object]:
    matches = sorted((row, index) for index, run in enumerate(runs) for row in table.find_rows(run))
    matching = [runs[index] for index in sorted({index for _, index in matches})]
    labels = find_labels(table, matching)
    shown = dict.fromkeys(name for run in matching for name in table.find_compared(run))
    keys = [key for key in (*table.fixed, *table.keys) if key not in ("method", "budget")]
    rows = [
        {
            "run": index,
            "settings": [str(find_setting(runs[index], key)) for key in keys],
            "where": row,
            "costs": {name: COSTS[name](runs[index]) for name in shown if name in COSTS},
        }
        for row, index in matches
    ]
    return {
        **{"name": table.name, "source": table.source, "title": table.title, "data": table.data},
        "labels": labels,
        "keys": keys,
        "metrics": {  # measured metrics to compare with each: itself and its variants on other detectors
            name: [name] * any(name in run.metrics for run in matching) + list_variants(name, matching)
            for name in shown
        },
        "also": [name for name in table.also if any(name in run.metrics for run in matching)],
        "printed": [
            {name: [table.cell(label, where, name) for label in labels] for name in shown}
            for where in table.rows
        ],
        "rows": rows,
    }
