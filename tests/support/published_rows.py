"""Rows of published tables that a run belongs to."""

from kvbench.report.papers.published import PublishedTable, Settings
from kvbench.runs.record.results import Results


def rows_of(table: PublishedTable, run: Results) -> list[Settings]:
    """The settings of the rows that match a run."""
    return [table.rows[place] for place in table.find_rows(run)]
