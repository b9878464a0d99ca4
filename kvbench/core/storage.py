"""Settings of low-bit storage of keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvbench.core.config import ConfigError

CODE_DTYPES = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Bits of a number by low-bit `cache_dtype`."""
LEVELS = (16, 8, 4, 3, 2)
"""Bits of a precision that a method chooses, and of `StorageConfig.key_bits` and `value_bits`."""
ROTATED_BITS = (4, 3, 2)
"""Bits that codes of rotated vectors may have."""
CODING_BITS = {"rotated": (16, *ROTATED_BITS), "fp8": (8,)}
"""Bits of a coding's numbers, where they are fewer than `LEVELS`."""
FP8_SETTINGS = ("residual", "before_rotation", "exempt")
"""Fields of `StorageConfig` that `cache_dtype=fp8`, which has no scales to choose, uses."""


@dataclass(frozen=True)
class StorageConfig:
    """Settings of low-bit storage; `cache_dtype=fp8` uses `FP8_SETTINGS` only, 16 and 32 bits none.

    A block is the tokens that a head keeps of a segment, or of each `group` positions of it; its values share scales.
    A block whose codes and scales would take no fewer bytes stays in 16 bits, and so does a segment of one token with
    codebooks or rotated vectors.

    Attributes:
        keys: one scale per channel of a block (`channel`), per token (`token`), levels of a static codebook per
            channel (`codebook`), calibrated once per model, fixed levels of the Hadamard-rotated vector with one
            factor per token (`rotated`, TurboQuant, arXiv:2504.19874), or float8 e4m3 (`fp8`).
        values: `token`, `channel`, `codebook`, `rotated` or `fp8`.
        group: positions that share the scale of a channel; null for the whole segment.
        residual: a segment stays in 16 bits until this many newer tokens exist (KIVI, arXiv:2402.02750).
        before_rotation: RoPE is undone before keys are quantised, and applied again when they are read; false for
            rotated keys, whose rotation does not commute with RoPE.
        key_bits: bits of a key's number, 16 to leave keys as they are; null for the bits of `cache_dtype`.
        value_bits: bits of a value's number, as `key_bits`.
        exempt: first layers, and as many last ones, that stay in 16 bits.
    """

    keys: Literal["channel", "token", "codebook", "rotated", "fp8"] = "channel"
    values: Literal["token", "channel", "codebook", "rotated", "fp8"] = "token"
    group: int | None = None
    residual: int = 0
    before_rotation: bool = True
    key_bits: int | None = None
    value_bits: int | None = None
    exempt: int = 0

    def __post_init__(self) -> None:
        if self.group is not None and self.group < 1:
            raise ConfigError(f"storage.group={self.group}: must be at least 1, or null for a whole segment")
        for name in ("residual", "exempt"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"storage.{name}={value}: must be at least 0")
        for name, coding in (("key", self.keys), ("value", self.values)):
            bits, choices = getattr(self, f"{name}_bits"), CODING_BITS.get(coding, LEVELS)
            if bits is not None and bits not in choices:
                raise ConfigError(
                    f"storage.{name}_bits={bits}: with storage.{name}s={coding} must be one of "
                    f"{', '.join(map(str, choices))}"
                )
        if self.key_bits == self.value_bits == 16:
            raise ConfigError(
                "storage.key_bits=16, storage.value_bits=16: nothing is quantised; set cache_dtype=auto, without them"
            )
        if self.keys == "rotated" and self.before_rotation:
            raise ConfigError(
                "storage.keys=rotated: keys are rotated after RoPE; set storage.before_rotation=false"
            )


def select_used(storage: Mapping[str, object], cache_dtype: str) -> dict[str, object]:
    """Return the settings of storage that a `cache_dtype` uses: none in 16 or 32 bits, three in fp8, else all."""
    if cache_dtype not in CODE_DTYPES:
        return {}
    return {name: value for name, value in storage.items() if cache_dtype != "fp8" or name in FP8_SETTINGS}


CHANNEL = StorageConfig()
"""Storage settings of a run by default."""
CODEBOOKS = StorageConfig(keys="codebook", values="codebook")
"""Storage settings of every precision below 16 bits that a method chooses."""
