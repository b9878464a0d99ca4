"""Values that many runs share, written once: a page of a thousand runs stays small."""

import json


class Pool:
    """Distinct JSON values by number.

    Attributes:
        values: in the order in which they were first seen.
    """

    def __init__(self) -> None:
        self.values: list[object] = []
        self._numbers: dict[str, int] = {}

    def add(self, value: object) -> int:
        """Return the number of a value, which is added unless an equal one is there."""
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]
