"""Published tables with a row that matches a run, for the page's comparison with measured numbers."""

from collections.abc import Sequence

from kvbench.report.papers.comparison import list_variants
from kvbench.report.papers.published import COSTS, PublishedTable, find_setting, load
from kvbench.runs.record.results import Results


def list_tables(runs: Sequence[Results]) -> list[dict[str, object]]:
    """Return the tables that match a run; their rows hold the indices of the run and of the printed row."""
    return [entry for table in load().values() if (entry := _make_table(table, runs))["rows"]]


def _make_table(table: PublishedTable, runs: Sequence[Results]) -> dict[str, object]:
    own = [run for run in runs if any(table.matches(where, run) for where in table.rows())]
    labels = table.labels(sorted({r.model_label for r in own}), sorted({r.prompts_label for r in own}))
    keys = [key for key in (*table.fixed, *table.keys) if key not in ("method", "budget")]
    rows = [
        {
            "run": number,
            "settings": [str(find_setting(run, key)) for key in keys],
            "where": place,
            "costs": {name: COSTS[name](run) for name in table.metrics if name in COSTS},
        }
        for place, where in enumerate(table.rows())
        for number, run in enumerate(runs)
        if table.matches(where, run)
    ]
    return {
        **{"name": table.name, "source": table.source, "title": table.title, "data": table.data},
        "labels": list(labels),
        "keys": keys,
        "metrics": {name: _list_measured(name, own) for name in table.metrics},
        "also": [name for name in table.also if any(name in run.metrics for run in own)],
        "printed": [
            {name: [table.cell(label, where, name) for label in labels] for name in table.metrics}
            for where in table.rows()
        ],
        "rows": rows,
    }


def _list_measured(name: str, runs: Sequence[Results]) -> list[str]:
    """Return the measured metrics to compare with a published one: itself and its variants on other detectors."""
    return [*([name] if any(name in run.metrics for run in runs) else []), *list_variants(name, runs)]
