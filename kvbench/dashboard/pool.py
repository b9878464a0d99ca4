"""Values that runs share, stored once, and short numbers, so that a page of a thousand runs stays small."""

import json
import math


class Pool:
    """Distinct JSON values, each with an index.

    Attributes:
        values: the values in the order of their indices.
    """

    def __init__(self) -> None:
        self.values: list[object] = []
        self._indices: dict[str, int] = {}

    def add(self, value: object) -> int:
        """Return the index of a value, which is added if it is new; values that JSON lacks become strings."""
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in self._indices:
            self._indices[key] = len(self.values)
            self.values.append(value)
        return self._indices[key]


def shorten(value: float | None, digits: int = 6) -> float | None:
    """Return a number with so many significant digits; None for None and NaN."""
    return None if value is None or math.isnan(value) else float(f"{value:.{digits}g}")
