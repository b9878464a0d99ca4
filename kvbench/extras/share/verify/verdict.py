"""Verdict on a recorded run: differences from its record, and parts that could not be checked; its JSON and badge."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvbench.data.names import make_printable
from kvbench.data.publication import FILE_LIST, hash_publication
from kvbench.data.verification import WHOLE, Status, format_verification
from kvbench.report.tables import escape_markdown

MAX_SHOWN = 4
"""Maximum number of findings in a line."""


class Choice(NamedTuple):
    """Choice of samples by the verifier.

    Attributes:
        samples: number of samples of each run.
        seed: seed of the choice.
    """

    samples: int
    seed: int

    def choose(self, name: str, count: int) -> list[int]:
        """Return the indices of a run's chosen samples in order, or all of `count` if there are fewer."""
        chosen = Random(f"{self.seed} {name}").sample(range(count), min(self.samples, count))
        return sorted(chosen)


class Finding(NamedTuple):
    """One obstacle to a verified run.

    Attributes:
        what: part of the record, such as `sample 3` or `metric psnr`.
        text: what was found.
        missing: whether something is missing on this machine; otherwise the record is contradicted.
    """

    what: str
    text: str
    missing: bool = False


@dataclass(frozen=True)
class Verdict:
    """Outcome of the verification of one run; unprintable characters of its texts are replaced.

    Attributes:
        run: `<model>/<name of the run's folder>`.
        findings: obstacles; empty for a verified run.
        chosen: indices of the samples that the verifier's seed chose.
        samples: number of the run's samples.
        drawn: number of samples that were generated again: all in the batches of the chosen samples.
        compared: rule by which they were compared with the stored samples; empty if none was generated.
        other_arithmetic: names of differences between the recorded arithmetic and the arithmetic of this machine.
        metrics: number of metrics that were computed again.
    """

    run: str
    findings: tuple[Finding, ...] = ()
    chosen: tuple[int, ...] = ()
    samples: int = 0
    drawn: int = 0
    compared: str = ""
    other_arithmetic: tuple[str, ...] = ()
    metrics: int = 0

    def __post_init__(self) -> None:
        """Replace unprintable characters of untrusted files, which could hide lines of a terminal."""
        findings = tuple(
            Finding(make_printable(what), make_printable(text), missing)
            for what, text, missing in self.findings
        )
        object.__setattr__(self, "findings", findings)
        object.__setattr__(self, "run", make_printable(self.run))

    @property
    def status(self) -> Status:
        """`differs` if anything contradicts the record, otherwise `not verifiable here` if anything is missing."""
        if any(not finding.missing for finding in self.findings):
            return "differs"
        return "not verifiable here" if self.findings else "verified"

    def describe(self) -> str:
        """Return the verdict as one line."""
        if self.findings:
            ordered = sorted(self.findings, key=lambda finding: finding.missing)
            shown = [f"{finding.what}: {finding.text}" for finding in ordered[:MAX_SHOWN]]
            said = "; ".join(shown) + (f"; and {more} more" if (more := len(ordered) - len(shown)) else "")
        elif self.chosen:
            chosen = f"{len(self.chosen)} of {self.samples} samples"
            said = f"{chosen} ({self.drawn} drawn, {self.compared}), {self.metrics} metrics"
        else:
            said = self.compared
        return f"{self.status}: {self.run}: {said}"


def write_document(
    folder: Path, choice: Choice, verdicts: Sequence[Verdict], versions: object, by: str | None = None
) -> str:
    """Return the outcome as JSON: the choice of samples, versions, and each run's verdict.

    Args:
        folder: the verified folder.
        choice: choice of samples.
        verdicts: verdicts on its runs.
        versions: provenance of the verification, JSON values.
        by: name of the verifier; None if it is not given.
    """
    files = hash_publication(folder) if (folder / FILE_LIST).is_file() else None
    badge = write_badge(folder, choice, verdicts, by)
    fields = {"by": by, **choice._asdict(), "verifier": versions, "badge": badge}
    runs = [
        {**asdict(run), "findings": [finding._asdict() for finding in run.findings], "status": run.status}
        for run in verdicts
    ]
    return format_verification(folder, files, fields, runs)


def write_badge(folder: Path, choice: Choice, verdicts: Sequence[Verdict], by: str | None = None) -> str:
    """Return a line of Markdown for a dataset card, with the verifier's name and the rules of comparison."""
    runs = [verdict for verdict in verdicts if verdict.run != WHOLE]
    good = [run for run in runs if run.status == "verified"]
    word = "Verified" if all(verdict.status == "verified" for verdict in verdicts) else "Not verified"
    who = f" by {escape_markdown(by)}" if by else ""
    rules = " or ".join(sorted({run.compared for run in good}))
    drawn, metrics = sum(run.drawn for run in good), sum(run.metrics for run in good)
    command = f"kvbench verify {escape_markdown(folder.absolute().name)} samples={choice.samples} seed={choice.seed}"
    lacking = {finding.what for run in runs for finding in run.findings if finding.missing}
    names = ", ".join(sorted(what.removeprefix("metric ") for what in lacking if what.startswith("metric ")))
    again = f"{drawn} samples drawn again{f' ({rules})' if rules else ''}, {metrics} metrics computed again"
    unchecked = f"; not computed here: {escape_markdown(names)}" if names else ""
    day = datetime.now(UTC).date().isoformat()
    return f"> **{word}** on {day}{who}: {len(good)} of {len(runs)} runs, {again}{unchecked} (`{command}`)"
