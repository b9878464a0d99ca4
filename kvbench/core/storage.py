"""Settings of low-bit storage of keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from kvbench.core.config import Range, Rule, check_rules

CODE_DTYPES = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Bits per element, by low-bit `cache_dtype`."""
LEVELS = (16, 8, 4, 3, 2)
"""Bits per element that a method, or `StorageConfig.key_bits` and `value_bits`, may choose."""
ROTATED_BITS = (4, 3, 2)
"""Bits per element that codes of rotated vectors may have."""
CODING_BITS = {"rotated": (16, *ROTATED_BITS), "fp8": (8,)}
"""Allowed bits per element of codings that do not allow all `LEVELS`."""
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
        key_bits: bits per element of keys, 16 for unquantised keys; null for the bits of `cache_dtype`.
        value_bits: bits per element of values, likewise.
        exempt: number of first layers, and of last layers, that stay in 16 bits.
    """

    keys: Literal["channel", "token", "codebook", "rotated", "fp8"] = "channel"
    values: Literal["token", "channel", "codebook", "rotated", "fp8"] = "token"
    group: Annotated[int, Range(1)] | None = None
    residual: Annotated[int, Range(0)] = 0
    before_rotation: bool = True
    key_bits: int | None = None
    value_bits: int | None = None
    exempt: Annotated[int, Range(0)] = 0

    def __post_init__(self) -> None:
        rules: list[Rule] = []
        for name, coding, bits in (
            ("key", self.keys, self.key_bits),
            ("value", self.values, self.value_bits),
        ):
            choices = CODING_BITS.get(coding, LEVELS)
            allowed = f"with storage.{name}s={coding} must be one of {', '.join(map(str, choices))}"
            rules.append((f"{name}_bits", bits is not None and bits not in choices, allowed))
        none = "with storage.value_bits=16 nothing is quantised; set cache_dtype=auto, without both"
        after = "keys are rotated after RoPE; set storage.before_rotation=false"
        rules.append(("key_bits", self.key_bits == self.value_bits == 16, none))
        rules.append(("keys", self.keys == "rotated" and self.before_rotation, after))
        check_rules(rules, self, "storage.")


def select_used(storage: Mapping[str, object], cache_dtype: str) -> dict[str, object]:
    """Return the settings of storage that a `cache_dtype` uses: none in 16 or 32 bits, three in fp8, else all."""
    if cache_dtype not in CODE_DTYPES:
        return {}
    return {name: value for name, value in storage.items() if cache_dtype != "fp8" or name in FP8_SETTINGS}


CHANNEL = StorageConfig()
"""Storage settings of a run by default."""
CODEBOOKS = StorageConfig(keys="codebook", values="codebook")
"""Storage settings of every precision below 16 bits that a method chooses."""
