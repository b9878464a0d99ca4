"""Outcomes of `kvbench verify`: JSON files beside the verified folder, each valid for exactly the files it verified."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from kvbench.core.files import parse_json, read_text
from kvbench.data.names import clean_name

SCHEMA_VERSION = 2
PREFIX = "verification-"
"""Start of the name of an outcome's file, which no pattern of a run's name matches."""
WHOLE = "dataset"
"""Name under which a verdict on a dataset's files and tables stands in the list of runs."""
Status = Literal["verified", "not verifiable here", "differs"]
"""Verdicts, ascending in severity: the more severe one of a run and its dataset counts."""
STATUSES: tuple[Status, ...] = get_args(Status)
MAX_FINDING = 600
"""Maximum number of characters of a finding."""


@dataclass(frozen=True)
class Checked:
    """Verdict on one run, as its verifier states it.

    Attributes:
        status: the verdict, which is the dataset's if that is worse.
        by: the verifier's name; None if it was not given.
        finished: UTC day, `2026-01-31`; empty if it is not printable.
        chosen: number of samples chosen for verification.
        finding: the first finding; empty without one.
    """

    status: Status
    by: str | None
    finished: str
    chosen: int
    finding: str


def name_verification(folder: Path) -> Path:
    """Return the path of an outcome: beside the verified folder."""
    path = folder.absolute()
    return path.with_name(f"{PREFIX}{path.name}.json")


def format_verification(
    folder: Path, files: str | None, fields: Mapping[str, object], runs: Sequence[Mapping[str, object]]
) -> str:
    """Return an outcome as JSON.

    Args:
        folder: the verified folder; only its name is written.
        files: hash of its files, which only exact copies share; None for a folder that is not a dataset.
        fields: who verified, how and where, JSON values.
        runs: verdicts, each with `run`, `status`, `chosen` and `findings`.
    """
    values = {
        "schema_version": SCHEMA_VERSION,
        "folder": folder.absolute().name,
        "files_sha256": files,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **fields,
        "runs": runs,
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def list_verifications(folder: Path) -> list[Path]:
    """Return the paths of outcomes beside a folder, sorted by name; some may concern other folders."""
    return sorted(folder.absolute().parent.glob(f"{PREFIX}*.json"))


def read_verdicts(paths: Iterable[Path], files: str) -> dict[str, Checked]:
    """Return the verdicts by run of the outcomes for exactly the files with the hash `files`.

    Of several verdicts on a run, `differs` has precedence, then `verified`. Damaged outcomes, and those of an earlier
    version, which cannot tell damaged copies apart, are left out.
    """
    order = ("differs", "verified", "not verifiable here")
    known: dict[str, Checked] = {}
    for path in paths:
        for run, checked in _read(path, files).items():
            other = known.setdefault(run, checked)
            known[run] = min(other, checked, key=lambda one: order.index(one.status))
    return known


def _read(path: Path, files: str) -> dict[str, Checked]:
    """Return the verdicts of an outcome by run; none if it is damaged or for other files."""
    try:
        values = parse_json(read_text(path), finite=True)
        if (values["schema_version"], values["files_sha256"]) != (SCHEMA_VERSION, files):
            return {}
        by, day = clean_name(values["by"]), clean_name(values["finished"][:10]) or ""
        runs = {str(one["run"]): _read_verdict(one, by, day) for one in values["runs"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    whole = [runs.pop(WHOLE)] if WHOLE in runs else []
    return {
        name: max([one, *whole], key=lambda side: STATUSES.index(side.status)) for name, one in runs.items()
    }


def _read_verdict(verdict: Mapping[str, Any], by: str | None, day: str) -> Checked:
    """Read a verdict.

    Raises:
        ValueError, KeyError, TypeError: the verdict is damaged.
    """
    status, findings = verdict["status"], verdict["findings"]
    if status not in STATUSES:
        raise ValueError(f"{status}: unknown status")
    text = f"{findings[0]['what']}: {findings[0]['text']}" if findings else ""
    return Checked(status, by, day, len(verdict["chosen"]), clean_name(text, MAX_FINDING) or "")
