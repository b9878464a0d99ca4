"""Retention of every source by head, packed for the page."""

import base64
from pathlib import Path

import numpy as np

from kvbench.core.config import ConfigError
from kvbench.runs.generate.retention import read_retention

STEPS = 65535
"""Packed value of a share of 1, in 16 bits."""


def pack_retention(folder: Path) -> dict[str, object] | None:
    """Return a run's retention with its shares as base64 of 16-bit numbers; None where there is none.

    `kept` holds [layers, KV heads, sources] in that order, little-endian; `reason` stands alone if the file is damaged.
    """
    try:
        found = read_retention(folder)
        if found is None:
            return None
        kept = np.asarray(found.kept, np.float64)
    except (ConfigError, ValueError) as error:
        return {"reason": str(error)}
    packed = np.rint(kept.clip(0, 1) * STEPS).astype("<u2").tobytes()
    return {
        "segment": found.segment,
        "sources": found.sources,
        "tokens": found.tokens,
        "prompts": found.prompts,
        "shape": kept.shape,
        "kept": base64.b64encode(packed).decode(),
    }
