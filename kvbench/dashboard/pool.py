"""Values that runs share, stored once, so that a page of a thousand runs stays small."""

import json
import marshal
from typing import Any


class Pool:
    """Distinct JSON values, each with an index.

    Attributes:
        values: the values in the order of their indices.
    """

    def __init__(self) -> None:
        self.values: list[object] = []
        self._numbers: dict[str, int] = {}
        self._seen: dict[bytes, int] = {}

    def add(self, value: Any) -> int:
        """Return the index of a value, which is added if it is new."""
        try:
            bytes_ = marshal.dumps(value, 2)  # type: ignore[arg-type]  # a tenth of JSON's time; only compared, never read
        except ValueError:  # marshal does not know its type, which JSON writes as text
            return self._find(value)
        if bytes_ not in self._seen:
            self._seen[bytes_] = self._find(value)
        return self._seen[bytes_]

    def _find(self, value: object) -> int:
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]
