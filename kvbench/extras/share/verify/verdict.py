"""Verdict on a recorded run: what differs from its record, and what could not be checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.core.names import make_printable
from kvbench.data.verification import Status

MAX_SHOWN = 4
"""Most findings in a line."""


class Finding(NamedTuple):
    """One obstacle to a verified run.

    Attributes:
        what: part of the record, such as `sample 3` or `metric psnr`.
        text: what was found.
        missing: whether something is missing here; otherwise the record is contradicted.
    """

    what: str
    text: str
    missing: bool = False


@dataclass(frozen=True)
class Verdict:
    """Outcome of the verification of one run; letters of its texts that cannot be printed are replaced.

    Attributes:
        run: model and name of the run's folder.
        findings: empty for a verified run.
        chosen: indices of the samples that the verifier's seed chose.
        samples: number of the run's samples.
        drawn: samples that were drawn again: all of the chosen samples' batches.
        compared: rule by which they were compared with the stored ones; empty if none was drawn.
        other_arithmetic: what differs between the recorded arithmetic and the arithmetic here.
        metrics: number of metrics that were computed again.
        unchecked: reason by evaluator that could not be repeated here.
    """

    run: str
    findings: tuple[Finding, ...] = ()
    chosen: tuple[int, ...] = ()
    samples: int = 0
    drawn: int = 0
    compared: str = ""
    other_arithmetic: tuple[str, ...] = ()
    metrics: int = 0
    unchecked: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Replace letters of names and values that a stranger's files have, which could hide lines of a terminal."""
        findings = tuple(
            Finding(make_printable(one.what), make_printable(one.text), one.missing) for one in self.findings
        )
        unchecked = {make_printable(name): make_printable(text) for name, text in self.unchecked.items()}
        for name, value in (
            ("run", make_printable(self.run)),
            ("findings", findings),
            ("unchecked", unchecked),
        ):
            object.__setattr__(self, name, value)

    @property
    def status(self) -> Status:
        """`differs` if anything contradicts the record, otherwise `not verifiable here` if anything is missing."""
        if any(not finding.missing for finding in self.findings):
            return "differs"
        return "not verifiable here" if self.findings else "verified"

    def describe(self) -> str:
        """Return the verdict as one line."""
        if not self.findings and not self.chosen:
            said = self.compared
        elif not self.findings:
            chosen = f"{len(self.chosen)} of {self.samples} samples"
            said = f"{chosen} ({self.drawn} drawn, {self.compared}), {self.metrics} metrics"
        else:
            ordered = sorted(self.findings, key=lambda finding: finding.missing)
            shown = [f"{finding.what}: {finding.text}" for finding in ordered[:MAX_SHOWN]]
            more = len(ordered) - len(shown)
            said = "; ".join(shown) + (f"; and {more} more" if more else "")
        return f"{self.status}: {self.run}: {said}"
