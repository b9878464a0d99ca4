"""Notes below tables, and the column of a table whose equal settings ran other code."""

from collections.abc import Iterable, Mapping, Sequence

from kvbench.eval.protocol.scores import Metric
from kvbench.report.full_scores import describe_failed
from kvbench.report.seeds import describe_means, find_code, list_members
from kvbench.runs.code import identify_engine
from kvbench.runs.record.origins import list_origins
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
    """Return the sentences below a table, on means over seeds (`describe_means`), failed tasks and mixed code."""
    means, checkout = describe_means(rows, shown, df=df, peaks=peaks), describe_checkout(rows)
    notes = (
        describe_failed(rows),
        means,
        checkout,
        describe_mixed(rows),
        describe_digests(rows),
        describe_times(rows),
    )
    return [note for note in notes if note]


def list_digests(rows: Sequence[Results]) -> list[dict[str, str]]:
    """Return, for each row, the first digits of its engine's hash and of its calibration's where these differ.

    Engines differ within the rows or from the engine of this program; calibrations of one name differ in their numbers.
    """
    known = [row.provenance or {} for row in rows]
    engines = {str(one["engine_sha256"]) for one in known if "engine_sha256" in one}
    marked = ["engine"] if engines - {identify_engine()} else []
    calibrations: dict[object, set[object]] = {}
    for one in known:
        calibrations.setdefault(one.get("calibration"), set()).add(one.get("calibration_sha256"))
    if any(len(digests) > 1 for name, digests in calibrations.items() if name is not None):
        marked.append("calibration")
    return [{name: str(one.get(f"{name}_sha256") or "-")[:COLUMN_DIGITS] for name in marked} for one in known]


def describe_digests(rows: Sequence[Results]) -> str:
    """Return a sentence on runs made by another engine than this program's; empty without any."""
    runs = [member for row in rows for member in list_members(row)]
    ours = identify_engine()
    others = [run.run for run in runs if (run.provenance or {}).get("engine_sha256", ours) != ours]
    if not others:
        return ""
    return f"{len(others)} of {len(runs)} runs: made by another engine, kernels or core than this program's."


def describe_times(rows: Sequence[Results]) -> str:
    """Return a sentence on times marked with ~; empty without any."""
    if not any(row.latency.others for row in rows):
        return ""
    return "~: samples with another batch size, machine or load than most of a run's are left out."


def describe_mixed(rows: Sequence[Results]) -> str:
    """Return a sentence on runs made with several commits, versions or machines; empty without any."""
    runs = [member for row in rows for member in list_members(row)]
    mixed = [origins for run in runs if len(origins := list_origins(run.provenance)) > 1]
    if not mixed:
        return ""
    names = list(dict.fromkeys(name_origin(one) for origins in mixed for one in origins))
    return f"{len(mixed)} of {len(runs)} runs: made on several commits, versions or machines ({'; '.join(names)})."


def name_origin(origin: Mapping[str, object]) -> str:
    """Return an origin as commit, version of torch and machine."""
    code, versions = origin.get("code"), origin.get("versions")
    commit = str(code.get("commit"))[:NOTE_DIGITS] if isinstance(code, Mapping) else "commit not recorded"
    torch = f"torch {versions.get('torch')}" if isinstance(versions, Mapping) else "torch not recorded"
    return f"{commit}, {torch}, {origin.get('machine') or origin.get('gpu') or origin.get('cpu')}"


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
    """Return the hash of the first uncommitted changes that a run was made with; empty without any."""
    codes = [origin.get("code") for origin in list_origins(run.provenance)]
    changes = [str(code.get("diff_sha256") or "") for code in codes if isinstance(code, dict)]
    return next(filter(None, changes), "")
