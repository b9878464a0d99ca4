"""The reference: nothing is compressed."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View


@dataclass
class Full(Method):
    """Keep every token of every scale but the last, which nothing attends to later.

    Differs from the official programs in: they also store the last scale (10521 tokens instead of 6425 for Infinity at
    one megapixel), which no result depends on.
    """

    static: ClassVar[bool] = True

    @property
    def budgeted(self) -> bool:
        """Return False: everything fits."""
        return False

    def keep(self, view: View) -> None:
        """Keep everything."""
        return
