"""Comparison of texts that were read, stored and read again."""

import tempfile
from pathlib import Path

import numpy as np

from kvbench.eval.files.readings import COLUMNS, read_stored

MAX_NATS = 1e-2
"""Largest mean change of the divergence and of log-probabilities in another arithmetic, in nats."""


def compare_readings(stored: Path, drawn: bytes, *, exact: bool) -> str | None:
    """Return by how much a stored reading differs from one that was read again; None if it does not.

    Hidden states of the full cache, which published readings lack, do not count.

    Args:
        stored: file of the run.
        drawn: content of the file that was read again.
        exact: whether all columns must be equal; otherwise columns of probabilities may differ by rounding.
    """
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(drawn)
        file.flush()
        ours, theirs = read_stored(Path(file.name)), read_stored(stored)
    if not np.array_equal(ours.tokens, theirs.tokens):
        return "is of another text"
    names = COLUMNS if exact else ("kl", "nll", "nll_full")
    changes = {
        name: float(np.mean(np.abs(getattr(ours, name) - getattr(theirs, name), dtype=np.float64)))
        for name in names
    }
    if not np.isfinite(list(changes.values())).all():
        return "has values that are not finite"
    worst = max(changes, key=lambda name: changes[name])
    if changes[worst] <= (0.0 if exact else MAX_NATS):
        return None
    return f"{worst} differs by {changes[worst]:.3g} a token"
