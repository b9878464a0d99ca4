"""Outcome of a verification as JSON and as a line for a dataset's card."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from kvbench.core.files import hash_path
from kvbench.report.publication import FILE_LIST
from kvbench.report.tables import escape_markdown
from kvbench.verify.run import Choice
from kvbench.verify.verdict import WHOLE, Verdict

SCHEMA_VERSION = 1
PREFIX = "verification-"
"""Start of the name of the outcome's file, which no pattern of a run's name matches."""


def name_document(folder: Path) -> Path:
    """Return the path of the outcome's JSON: beside the verified folder."""
    path = folder.absolute()
    return path.with_name(f"{PREFIX}{path.name}.json")


def write_document(
    folder: Path, choice: Choice, verdicts: Sequence[Verdict], versions: object, by: str | None = None
) -> str:
    """Return the outcome as JSON: the choice of samples, versions, and each run's verdict.

    `files_sha256` is the hash of a dataset's SHA256SUMS, which tells copies of the dataset from others.

    Args:
        folder: what was verified; only its name is written.
        choice: of samples.
        verdicts: of its runs.
        versions: provenance of the verification, JSON values.
        by: name of the verifier; None if it is not given.
    """
    listed = folder / FILE_LIST
    values = {
        "schema_version": SCHEMA_VERSION,
        "folder": folder.absolute().name,
        "files_sha256": hash_path(listed) if listed.is_file() else None,
        "by": by,
        **choice._asdict(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "verifier": versions,
        "badge": write_badge(folder, choice, verdicts),
        "runs": [_describe(one) for one in verdicts],
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def _describe(one: Verdict) -> dict[str, object]:
    findings = [finding._asdict() for finding in one.findings]
    return {**asdict(one), "findings": findings, "status": one.status}


def write_badge(folder: Path, choice: Choice, verdicts: Sequence[Verdict]) -> str:
    """Return a line of Markdown for the card of a dataset."""
    runs = [one for one in verdicts if one.run != WHOLE]
    good = [one for one in runs if one.status == "verified"]
    word = "Verified" if all(one.status == "verified" for one in verdicts) else "Not verified"
    drawn, metrics = sum(one.drawn for one in good), sum(one.metrics for one in good)
    command = f"kvbench verify {escape_markdown(folder.absolute().name)} samples={choice.samples} seed={choice.seed}"
    day = datetime.now(UTC).date().isoformat()
    names = sorted({name for one in runs for name in one.unchecked})
    unchecked = f"; not computed here: {escape_markdown(', '.join(names))}" if names else ""
    return (
        f"> **{word}** on {day}: {len(good)} of {len(runs)} runs, {drawn} samples drawn again, {metrics} metrics "
        f"computed again{unchecked} (`{command}`)"
    )
