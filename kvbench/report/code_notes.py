"""Notes below tables, and the column of a table whose equal settings ran other code."""

from collections.abc import Iterable, Sequence

from kvbench.eval.protocol.scores import Metric
from kvbench.report.seeds import describe_means, find_code, list_members
from kvbench.runs.record.results import Results

COLUMN_DIGITS, NOTE_DIGITS = 8, 12
"""Digits of a hash in a column and in a note."""
MAX_LISTED = 3
"""Largest number of hashes in a note."""


def name_code(run: Results) -> str:
    """Return the code of a run: hashes of classes that match no pin, else the revision of its method."""
    code = find_code(run)
    edited = [version[:COLUMN_DIGITS] for _, _, version in code if isinstance(version, str)]
    revisions = [f"revision {version}" for part, _, version in code if part == "method"]
    return ", ".join(dict.fromkeys(edited or revisions)) or "-"


def list_notes(
    rows: Sequence[Results], shown: Iterable[Metric | None], *, df: str = "df", peaks: bool = True
) -> list[str]:
    """Return the sentences below a table, on means over seeds (`describe_means`) and on uncommitted changes."""
    return [
        note for note in (describe_means(rows, shown, df=df, peaks=peaks), describe_checkout(rows)) if note
    ]


def describe_checkout(rows: Sequence[Results]) -> str:
    """Return a sentence on runs that were made in a checkout with uncommitted changes; empty without any."""
    runs = [member for row in rows for member in list_members(row)]
    changes = [change for run in runs if (change := _find_changes(run))]
    if not changes:
        return ""
    names = list(dict.fromkeys(change[:NOTE_DIGITS] for change in changes))
    more = f", {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    listed = ", ".join(names[:MAX_LISTED]) + more
    return f"{len(changes)} of {len(runs)} runs: checkout with uncommitted changes ({listed})."


def _find_changes(run: Results) -> str:
    code = (run.provenance or {}).get("code")
    return str(code.get("diff_sha256") or "") if isinstance(code, dict) else ""
