"""Storage of keys and values in fewer than 16 bits: the settings of a run, and the precisions that a method chooses."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvbench.core.config import ConfigError

CODE_DTYPES = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Values of `cache_dtype` below 16 bits, and the bits of a number."""
LEVELS = (16, 8, 4, 3, 2)
"""Bits that a `Precision` may have."""


class Precision(NamedTuple):
    """Storage of one segment's tokens in one head.

    Attributes:
        bits: of a number: 16, 8, 4, 3 or 2; fewer than 16 are codes of static codebooks, but in a segment of a single
            token, which has 16 in any case.
        shared: the unconditional sequences do not store them, they read those of their conditional twins.
    """

    bits: int
    shared: bool = False


def find_stored_bits(bits: int, tokens: int) -> int:
    """Return the bits of a number in a segment of so many tokens that codebooks store, for the bits that are chosen.

    A single token, such as the first scale, stays in 16: a calibration sees one number a prompt in each of its
    channels, and it is a sink, whose error every later token sees.
    """
    return 16 if tokens == 1 else bits


@dataclass(frozen=True)
class StorageConfig:
    """Settings of storage for a `cache_dtype` of fewer than 16 bits; fp8 uses `before_rotation` alone.

    The numbers of a block share scales. A block is the tokens that a head keeps of a segment, or of each run of `group`
    positions of it. A block whose codes and scales take no fewer bytes than its numbers in 16 bits, as one of a single
    token may, stays in 16 bits. So does a segment of a single token that codebooks would code.

    Attributes:
        keys: codes are steps on a scale of each channel of a block (`channel`), of each token (`token`), or name levels
            of a static codebook of each channel (`codebook`), which a calibration makes once per model.
        values: the same choice, `token` or `codebook`.
        group: positions that share the scale of a channel; null: those of the whole segment.
        residual: a segment stays in 16 bits until so many newer tokens are there (KIVI, arXiv:2402.02750).
        before_rotation: the model's rotation is undone before keys are quantised, and applied again when they are read.
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
        """Whether a calibration must make codebooks."""
        return "codebook" in (self.keys, self.values)


CHANNEL = StorageConfig()
"""The default of a run."""
CODEBOOKS = StorageConfig(keys="codebook", values="codebook")
"""Storage settings of every `Precision` below 16 bits."""
