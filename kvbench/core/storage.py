"""Low-bit storage of keys and values: settings of a run, and precisions that a method chooses."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvbench.core.config import ConfigError

CODE_DTYPES = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Bits of each low-bit `cache_dtype`."""
LEVELS = (16, 8, 4, 3, 2)
"""Bits of a `Precision`."""


class Precision(NamedTuple):
    """Storage of one segment's tokens in one head.

    Attributes:
        bits: 16, 8, 4, 3 or 2; below 16, codes of static codebooks. A segment of one token always has 16.
        shared: unconditional sequences read the tokens of their conditional twins and store none.
    """

    bits: int
    shared: bool = False


def find_stored_bits(bits: int, tokens: int) -> int:
    """Return the bits of a segment of `tokens` tokens that is stored with codebooks of `bits` bits.

    A single token, such as the first scale, stays in 16 bits: it gives calibration one value per prompt and channel,
    and as a sink its error reaches every later token.
    """
    return 16 if tokens == 1 else bits


@dataclass(frozen=True)
class StorageConfig:
    """Settings of low-bit storage; fp8 uses `residual` and `before_rotation` only.

    A block is the tokens that a head keeps of a segment, or of each `group` positions of it; its values share scales.
    A block whose codes and scales would take no fewer bytes stays in 16 bits, and so does a segment of one token with
    codebooks.

    Attributes:
        keys: one scale per channel of a block (`channel`), per token (`token`), or levels of a static codebook per
            channel (`codebook`), calibrated once per model.
        values: `token` or `codebook`.
        group: positions that share the scale of a channel; null for the whole segment.
        residual: a segment stays in 16 bits until this many newer tokens exist (KIVI, arXiv:2402.02750).
        before_rotation: RoPE is undone before keys are quantised, and applied again when they are read.
    """

    keys: Literal["channel", "token", "codebook"] = "channel"
    values: Literal["token", "codebook"] = "token"
    group: int | None = None
    residual: int = 0
    before_rotation: bool = True

    def __post_init__(self) -> None:
        if self.group is not None and self.group < 1:
            raise ConfigError(f"storage.group={self.group}: must be at least 1, or null for a whole segment")
        if self.residual < 0:
            raise ConfigError(f"storage.residual={self.residual}: must be at least 0")

    @property
    def calibrated(self) -> bool:
        """Whether codebooks must be calibrated."""
        return "codebook" in (self.keys, self.values)


CHANNEL = StorageConfig()
"""Default of a run."""
CODEBOOKS = StorageConfig(keys="codebook", values="codebook")
"""Storage settings of every `Precision` below 16 bits."""
