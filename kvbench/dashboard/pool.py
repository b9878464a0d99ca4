"""Values that runs share, stored once, so that a page of a thousand runs stays small."""

import json


class Pool:
    """Distinct JSON values by number.

    Attributes:
        values: values in the order of their numbers.
    """

    def __init__(self) -> None:
        self.values: list[object] = []
        self._numbers: dict[str, int] = {}

    def add(self, value: object) -> int:
        """Return the number of a value; a new value is added."""
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]
