"""Outcome of a verification as JSON and as a line for a dataset's card."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from kvbench.data.publication import FILE_LIST, hash_publication
from kvbench.data.verification import WHOLE, format_verification
from kvbench.extras.share.verify.run import Choice
from kvbench.extras.share.verify.verdict import Verdict
from kvbench.report.tables import escape_markdown


def write_document(
    folder: Path, choice: Choice, verdicts: Sequence[Verdict], versions: object, by: str | None = None
) -> str:
    """Return the outcome as JSON: the choice of samples, versions, and each run's verdict.

    Args:
        folder: what was verified.
        choice: of samples.
        verdicts: of its runs.
        versions: provenance of the verification, JSON values.
        by: name of the verifier; None if it is not given.
    """
    files = hash_publication(folder) if (folder / FILE_LIST).is_file() else None
    badge = write_badge(folder, choice, verdicts)
    fields = {"by": by, **choice._asdict(), "verifier": versions, "badge": badge}
    return format_verification(folder, files, fields, [_describe(one) for one in verdicts])


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
