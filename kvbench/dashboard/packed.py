"""Records of forced decoding, divergence and retention maps of runs, encoded for the page."""

import base64
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvbench.core.config import ConfigError
from kvbench.dashboard.pool import Pool, shorten
from kvbench.forced.record import ScoredText
from kvbench.report.drifts import Drifts
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.record.results import Results

CELL = "  "
"""Characters that stand for an image's token."""
MAX_GIVEN = 600
"""Characters of the given tokens, before the scored ones, that the page shows."""
MAX_UINT16 = 65535
"""Integer that a share of 1 is stored as."""


def pack_reading(path: Path, prompt: object, pool: Pool) -> dict[str, object] | None:
    """Return a record of forced decoding, or None if its file is missing or damaged.

    `kl` is float32 [tokens] in base64, little-endian. `given` (end of the given characters), `words` (scored tokens; of
    an image blank cells with line ends after rows) and `full` (the full cache's top-1 tokens) are indices in the pool,
    as runs share them. `others` has the method's top-1 token by position where it differs.
    """
    try:
        record = ScoredText.read(path)
    except ValueError:
        return None
    texts = (
        draw_cells(record.groups) if record.groups else [record.name_token(token) for token in record.tokens]
    )
    return {
        "unit": record.unit,
        "given": pool.add(record.find_before(str(prompt or ""))[-MAX_GIVEN:]),
        "words": pool.add(texts),
        "full": pool.add([record.name_token(token) for token in record.likeliest_full]),
        "kl": base64.b64encode(record.kl.astype("<f4").tobytes()).decode(),
        "others": {
            str(position): record.name_token(record.likeliest[position])
            for position in np.flatnonzero(~record.same).tolist()
        },
    }


def draw_cells(groups: Sequence[int]) -> list[str]:
    """Return a cell for each token of an image, in rows, or in scales one below the other, square if possible."""
    cells = []
    for count in groups:
        side = math.isqrt(count) if len(set(groups)) > 1 and math.isqrt(count) ** 2 == count else count
        lines = [CELL + "\n" * (index % side == 0) for index in range(1, count + 1)]
        cells += [*lines[:-1], lines[-1] + "\n" * (side < count)]
    return cells


def pack_drift(drifts: Drifts, run: Results, pool: Pool) -> dict[str, object] | None:
    """Return the divergence of a run over positions with six digits; None if there is none or it is not finite."""
    drift = drifts.read(run)
    if drift is None or not math.isfinite(sum(band.mean for band in drift.kl)):
        return None
    return {
        "unit": drift.unit,
        "edges": pool.add(drift.edges),
        **{name: [[*map(shorten, band)] for band in getattr(drift, name)] for name in ("kl", "same_top1")},
        "tail": {name: shorten(value) for name, value in drift.tail.items()},
    }


def pack_retention(folder: Path) -> dict[str, object] | None:
    """Return a run's retention with its shares as 16-bit integers in base64; None if it was not recorded.

    `kept` is uint16 [layers, KV heads, sources], little-endian. A damaged file gives only its `reason`.
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
