"""Printed figures of papers, compared with figures computed from the shapes of models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Literal

from kvbench.core.segments import ModelSpec
from kvbench.report.papers.published import PublishedRow, find, model_of

Specs = Mapping[str, ModelSpec]
Verdict = Literal["reproduced", "under one reading", "not derivable", "no number printed"]


@dataclass(frozen=True)
class PrintedFigure:
    """A printed figure and the figure computed from shapes.

    Attributes:
        model: name in `conf/model`.
        row: row of the table.
        printed: the value as published, with its unit.
        computed: the computed value, with its unit.
        verdict: whether both agree to the printed digit.
        how: what was counted, or why the figure cannot be computed.
    """

    model: str
    row: str
    printed: str
    computed: str
    verdict: Verdict
    how: str


def list_rows(name: str, specs: Specs) -> Iterator[tuple[ModelSpec, str, PublishedRow]]:
    """Yield the rows of a published table for models in `specs`, as model, label of the column, and row."""
    for label, rows in find(name).models.items():
        if model_of(label) in specs:
            yield from ((specs[model_of(label)], label, row) for row in rows)


def prints_as(value: float, text: str) -> str | None:
    """Return how a value prints as `text`: `rounded`, `cut off`, or None if it does not."""
    unit = Decimal(1).scaleb(-count_digits(text))
    for rounding, name in ((ROUND_HALF_UP, "rounded"), (ROUND_DOWN, "cut off")):
        if Decimal(value).quantize(unit, rounding) == Decimal(text):
            return name
    return None


def rounding_interval(text: str) -> tuple[float, float]:
    """Return the interval [low, high) of the values that print as a number when rounded or cut off."""
    unit = 10.0 ** -count_digits(text)
    return float(text) - unit / 2, float(text) + unit


def compare(
    model: str, row: str, text: str, value: float, unit: str, how: str, agreeing: Verdict = "reproduced"
) -> PrintedFigure:
    """Compare a computed value with a printed number.

    `how` says what was counted; `agreeing` is the verdict if both agree to the printed digit.
    """
    rounding = prints_as(value, text)
    computed = f"{value:.{count_digits(text) + 1}f} {unit}"
    if rounding == "cut off":
        how += "; printed cut off, not rounded"
    return PrintedFigure(
        model, row, f"{text} {unit}", computed, agreeing if rounding else "not derivable", how
    )


def count_digits(text: str) -> int:
    """Return the number of decimals of a printed number."""
    return len(text.partition(".")[2])
