"""Digests of the calibrations and of the engine that made the samples of a run; its name does not hold them.

A run's name has what a calibration was made from, so that it is the same on every machine; the numbers in the file
differ by rounding. All samples of a run are made by one calibration and one engine.
"""

from collections.abc import Mapping
from pathlib import Path

from kvbench.core.files import parse_json, read_text

DIGESTS = {
    "calibration_sha256": "calibration",
    "codebooks_sha256": "codebooks",
    "engine_sha256": "engine, kernels or core",
}
"""Keys of provenance.json, and what each is the SHA-256 of."""
SHOWN_DIGITS = 8


def read_digests(folder: Path) -> Mapping[str, object]:
    """Return the digests in a run's provenance.json; none if it is missing or damaged."""
    try:
        values = parse_json(read_text(folder / "provenance.json"))
    except (OSError, ValueError):
        return {}
    return {name: values.get(name) for name in DIGESTS} if isinstance(values, dict) else {}


def describe_difference(known: Mapping[str, object], ours: Mapping[str, object]) -> str:
    """Return in which digests two records differ, as `another calibration (1a2b3c4d, not 5e6f7a8b)`; empty for none.

    A side without a record differs in nothing.
    """
    names = [name for name in DIGESTS if known and ours and known.get(name) != ours.get(name)]
    return ", ".join(
        f"another {DIGESTS[name]} ({_cut(known.get(name))}, not {_cut(ours.get(name))})" for name in names
    )


def _cut(sha256: object) -> str:
    return "none" if sha256 is None else str(sha256)[:SHOWN_DIGITS]
