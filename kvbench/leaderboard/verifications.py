"""Outcomes of `kvbench verify` for published datasets, matched to them by the hash of their lists of files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.files import parse_json, read_text
from kvbench.core.names import clean_name
from kvbench.leaderboard.datasets import Dataset
from kvbench.verify.document import PREFIX
from kvbench.verify.verdict import WHOLE, Status

UNKNOWN = "not stated"
MAX_FINDING = 600
"""Most letters of a finding."""
ORDER: tuple[Status, ...] = ("differs", "verified", "not verifiable here")
"""Statuses; of several outcomes for a run, the first of these counts."""
SEVERITY: tuple[Status, ...] = ("verified", "not verifiable here", "differs")
"""Statuses; of a run and its dataset, the last of these counts."""


@dataclass(frozen=True)
class Checked:
    """Verdict on one run.

    Attributes:
        status: the verdict, which is the dataset's if that is not verified.
        chosen: number of samples that were chosen.
        text: the first finding; empty without one.
    """

    status: Status
    chosen: int = 0
    text: str = ""


@dataclass(frozen=True)
class Verification:
    """One outcome.

    Attributes:
        by: the verifier's name; None if it was not given.
        finished: UTC time; empty if it is no printable text.
        seed: seed of the choice of samples.
        machine: processor or card on which samples were drawn again; None if it was not given.
        runs: verdict by path of the run.
    """

    by: str | None
    finished: str
    seed: int
    machine: str | None
    runs: Mapping[str, Checked]

    @property
    def good(self) -> int:
        """Number of verified runs."""
        return sum(one.status == "verified" for one in self.runs.values())


def find_verifications(dataset: Dataset) -> tuple[Verification, ...]:
    """Return the outcomes beside a dataset's folder that are of exactly its files, by time.

    Damaged files, and outcomes of other contents, are left out.
    """
    found = (_read(path) for path in sorted(dataset.folder.absolute().parent.glob(f"{PREFIX}*.json")))
    same = [read for digest, read in filter(None, found) if digest == dataset.files_sha256]
    return tuple(sorted(same, key=lambda one: (one.finished, one.by or "")))


def choose_checked(verifications: Iterable[Verification], path: str) -> tuple[Verification, Checked] | None:
    """Return the outcome that counts for a run: one that differs before one that is verified; None without any."""
    known = [(one, one.runs[path]) for one in verifications if path in one.runs]
    return min(known, key=lambda pair: ORDER.index(pair[1].status), default=None)


def _read(path: Path) -> tuple[str, Verification] | None:
    """Return the hash of the list of files that an outcome is of, and the outcome; None for a damaged file."""
    try:
        values = parse_json(read_text(path), finite=True)
        runs = {str(one["run"]): _read_checked(one) for one in values["runs"]}
        whole = runs.pop(WHOLE, None)
        if whole is not None:
            runs = {name: _choose_worse(one, whole) for name, one in runs.items()}
        by, machine = values.get("by"), values["verifier"].get("machine")
        return str(values["files_sha256"]), Verification(
            clean_name(by),
            clean_name(values["finished"]) or "",
            int(values["seed"]),
            clean_name(machine),
            runs,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _choose_worse(one: Checked, whole: Checked) -> Checked:
    """Return a run's verdict, or its dataset's if that is worse."""
    return max(one, whole, key=lambda side: SEVERITY.index(side.status))


def _read_checked(one: Mapping[str, Any]) -> Checked:
    """Read a verdict.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    status, findings = one["status"], one["findings"]
    if status not in ORDER:
        raise ValueError(f"{status}: no such status")
    chosen: Sequence[object] = one["chosen"]
    text = f"{findings[0]['what']}: {findings[0]['text']}" if findings else ""
    return Checked(status, len(chosen), clean_name(text, MAX_FINDING) or (UNKNOWN if findings else ""))
