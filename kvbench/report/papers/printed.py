"""Comparison of printed figures with figures computed from shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Literal

from kvbench.core.segments import ModelSpec

Specs = Mapping[str, ModelSpec]
Verdict = Literal["reproduced", "under one reading", "not derivable", "no number printed"]


@dataclass(frozen=True)
class Claim:
    """One printed figure beside what shapes give.

    Attributes:
        model: name in `conf/model`.
        what: row of the table.
        printed: as published, unit included.
        ours: what the arithmetic gives, as text.
        verdict: whether both agree to the printed digit.
        how: what was counted, or why it cannot be.
    """

    model: str
    what: str
    printed: str
    ours: str
    verdict: Verdict
    how: str


def prints_as(value: float, text: str) -> str | None:
    """Return how a value was rounded to a printed number: "rounded", "cut off", or None if it is another number."""
    unit = Decimal(1).scaleb(-count_digits(text))
    for rounding, name in ((ROUND_HALF_UP, "rounded"), (ROUND_DOWN, "cut off")):
        if Decimal(value).quantize(unit, rounding) == Decimal(text):
            return name
    return None


def rounding_interval(text: str) -> tuple[float, float]:
    """Values that print as a number: [low, high), whether it was rounded or cut off."""
    unit = 10.0 ** -count_digits(text)
    return float(text) - unit / 2, float(text) + unit


def compare(
    model: str, what: str, text: str, value: float, unit: str, how: str, agreeing: Verdict = "reproduced"
) -> Claim:
    """Hold what shapes give against a printed number.

    Args:
        model: name in `conf/model`.
        what: row of the table.
        text: the number as printed.
        value: what shapes give, in the same unit.
        unit: of both.
        how: what was counted.
        agreeing: the verdict if both agree to the printed digit.
    """
    way = prints_as(value, text)
    ours = f"{value:.{count_digits(text) + 1}f} {unit}"
    if way == "cut off":
        how += "; printed cut off, not rounded"
    return Claim(model, what, f"{text} {unit}", ours, agreeing if way else "not derivable", how)


def count_digits(text: str) -> int:
    """Return how many digits a printed number has behind the point."""
    return len(text.partition(".")[2])
