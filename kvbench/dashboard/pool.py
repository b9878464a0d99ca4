"""Values that runs share, stored once, so that a page of a thousand runs stays small."""

import json


class Pool:
    """Distinct JSON values, each with an index.

    Attributes:
        values: the values in the order of their indices.
    """

    def __init__(self) -> None:
        self.values: list[object] = []
        self._numbers: dict[str, int] = {}

    def add(self, value: object) -> int:
        """Return the index of a value, which is added if it is new; what JSON does not know becomes text."""
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]
