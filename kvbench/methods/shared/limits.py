"""Ranges of a method's settings."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple


class Limit(NamedTuple):
    """Range of a setting that is a number.

    Attributes:
        low: minimum.
        high: maximum.
        wants: text of the message instead of the range.
    """

    low: float
    high: float = inf
    wants: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Raise a ValueError that names the setting if its value is out of range or NaN; None is valid."""
        if value is not None and not self.low <= value <= self.high:
            range_ = f"be at least {self.low}" if self.high == inf else f"lie in {self.low}..{self.high}"
            raise ValueError(f"method.{name}={value}: {self.wants or f'must {range_}'}")


SHARE = Limit(0, 1)


def set_limits(**limits: Limit) -> Mapping[str, Limit]:
    """Return `Method.limits`, the range of each setting by its name."""
    return limits
