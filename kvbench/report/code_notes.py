"""Notes below tables, the column that tells apart runs of equal settings and different code, and the current code."""

from collections.abc import Iterable, Mapping, Sequence

from kvbench.eval.protocol.scores import Metric
from kvbench.report.conditions import describe_sinks
from kvbench.report.full_scores import describe_failed
from kvbench.report.memory import describe_unused
from kvbench.report.seeds import describe_means, find_code, find_settings, list_members
from kvbench.runs.code import identify_engine, is_as_now
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.results import Results

COLUMN_DIGITS, NOTE_DIGITS = 8, 12
"""Digits of a hash in a column and in a note."""
MAX_LISTED = 3
"""Maximum number of hashes in a note."""


def name_code(run: Results) -> str:
    """Return the code of a run: hashes of classes that match no pin, else the revision of its method."""
    code = find_code(run)
    edited = [version[:COLUMN_DIGITS] for _, _, version in code if isinstance(version, str)]
    revisions = [f"revision {version}" for part, _, version in code if part == "method"]
    return ", ".join(dict.fromkeys(edited or revisions)) or "-"


def keep_newest(runs: Sequence[Results], kept: str | None = None) -> list[Results]:
    """Return, of runs that differ only in seeds and code, those of the current code, else those of the newest code.

    The references of the returned runs, and the run with the folder name `kept`, are returned too.
    """
    known = [(run, find_settings(run), find_code(run)) for run in runs]
    by_age = sorted(known, key=lambda entry: (is_now(entry[0]), entry[0].finished))
    newest = {settings: code for _, settings, code in by_age}
    chosen = [run for run, settings, code in known if code == newest[settings]]
    names = {kept, *(run.run for run in chosen), *(run.reference for run in chosen)}
    return [run for run in runs if run.run in names]


def is_now(run: Results, *, pinned: bool = True) -> bool:
    """Return whether a run's method and model have the current code; without `pinned`, only unpinned classes count."""
    code = [part for part in find_code(run) if pinned or isinstance(part[2], str)]
    return all(is_as_now(name, version) for _, name, version in code)


def list_marks(
    rows: Sequence[Results],
    shown: Iterable[Metric | None],
    *,
    df: str = "df",
    peaks: bool = True,
    times: bool = True,
) -> list[str]:
    """Return the sentences on a table: on unused budgets, failed tasks, sinks, means over seeds and marked times.

    `shown` are its metrics, and `df` names degrees of freedom in its cells. It has memory if `peaks`, times if `times`.
    """
    notes = [describe_unused(rows) * peaks, describe_failed(rows), describe_sinks(rows)]
    notes.append(describe_means(rows, shown, df=df, peaks=peaks))
    if peaks and times and any(row.latency.mark for row in rows):
        notes.append(
            "~: a time beside other work, or that leaves out samples of another batch size, machine or load than most."
        )
    return [*filter(None, notes)]


def list_made(rows: Sequence[Results]) -> list[str]:
    """Return the sentences on the code and the machines that made the runs of a table."""
    runs = [member for row in rows for member in list_members(row)]
    edited = [run for run in runs if not is_now(run, pinned=False)]
    other = _describe_part(edited, runs, "made by other code of method or model than this program's")
    return [*filter(None, (describe_checkout(runs), describe_mixed(runs), describe_digests(runs), other))]


def _describe_part(part: Sequence[object], runs: Sequence[Results], what: str) -> str:
    """Return a sentence on what a part of the runs has; empty if that part is."""
    return f"{len(part)} of {len(runs)} runs: {what}." if part else ""


def list_digests(rows: Sequence[Results]) -> list[dict[str, str]]:
    """Return, for each row, the first digits of its engine's hash and of its calibration's where these differ.

    Engines differ within the rows or from the engine of this program; calibrations of one name differ in their values.
    """
    known = [row.provenance or {} for row in rows]
    engines = {str(origin["engine_sha256"]) for origin in known if "engine_sha256" in origin}
    marked = ["engine"] if engines - {identify_engine()} else []
    calibrations: dict[object, set[object]] = {}
    for origin in known:
        calibrations.setdefault(origin.get("calibration"), set()).add(origin.get("calibration_sha256"))
    if any(len(digests) > 1 for name, digests in calibrations.items() if name is not None):
        marked.append("calibration")
    return [
        {name: str(origin.get(f"{name}_sha256") or "-")[:COLUMN_DIGITS] for name in marked}
        for origin in known
    ]


def describe_digests(runs: Sequence[Results]) -> str:
    """Return a sentence on runs whose engine differs from this program's; empty if there are none."""
    current = identify_engine()
    others = [run for run in runs if (run.provenance or {}).get("engine_sha256", current) != current]
    return _describe_part(others, runs, "made by another engine, kernels or core than this program's")


def describe_mixed(runs: Sequence[Results]) -> str:
    """Return a sentence on runs made with several commits, versions or machines; empty if there are none."""
    mixed = [origins for run in runs if len(origins := list_origins(run.provenance)) > 1]
    names = dict.fromkeys(name_origin(origin) for origins in mixed for origin in origins)
    return _describe_part(mixed, runs, f"made on several commits, versions or machines ({'; '.join(names)})")


def name_origin(origin: Mapping[str, object]) -> str:
    """Return the commit, the version of torch and the machine of an entry of a provenance."""
    code, versions = origin.get("code"), origin.get("versions")
    commit = str(code.get("commit"))[:NOTE_DIGITS] if isinstance(code, Mapping) else "commit not recorded"
    torch = f"torch {versions.get('torch')}" if isinstance(versions, Mapping) else "torch not recorded"
    return f"{commit}, {torch}, {origin.get('machine') or origin.get('gpu') or origin.get('cpu')}"


def describe_checkout(runs: Sequence[Results]) -> str:
    """Return a sentence on runs that were made in a checkout with uncommitted changes; empty if there are none."""
    changes = [change for run in runs if (change := find_changes(run))]
    names = list(dict.fromkeys(change[:NOTE_DIGITS] for change in changes))
    more = f", {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    listed = ", ".join(names[:MAX_LISTED]) + more
    return _describe_part(changes, runs, f"checkout with uncommitted changes ({listed})")


def find_changes(run: Results) -> str:
    """Return the hash of the first uncommitted changes that a run was made with; empty if there are none."""
    codes = [origin.get("code") for origin in list_origins(run.provenance)]
    changes = [str(code.get("diff_sha256") or "") for code in codes if isinstance(code, dict)]
    return next(filter(None, changes), "")
