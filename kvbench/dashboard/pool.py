"""Values that runs share, stored once, so that a page of a thousand runs stays small."""

import json


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
