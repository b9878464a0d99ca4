"""Retention of every source by head, packed for the page."""

import base64
from pathlib import Path

import numpy as np

from kvbench.core.config import ConfigError
from kvbench.runs.generate.retention import read_retention

MAX_UINT16 = 65535
"""Packed value of a share of 1."""


def pack_retention(folder: Path) -> dict[str, object] | None:
    """Return a run's retention with its shares as base64 of 16-bit numbers; None if it was not recorded.

    `kept` is [layers, KV heads, sources], little-endian. A damaged file gives only its `reason`.
    """
    try:
        retention = read_retention(folder)
        if retention is None:
            return None
        kept = np.asarray(retention.kept, np.float64)
    except (ConfigError, ValueError) as error:
        return {"reason": str(error)}
    packed = np.rint(kept.clip(0, 1) * MAX_UINT16).astype("<u2").tobytes()
    return {
        "segment": retention.segment,
        "sources": retention.sources,
        "tokens": retention.tokens,
        "prompts": retention.prompts,
        "shape": kept.shape,
        "kept": base64.b64encode(packed).decode(),
    }
