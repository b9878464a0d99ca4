"""Full cache: the reference without compression."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View


@dataclass
class Full(Method):
    """Keep every token except those of the last segment, to which no later token attends.

    Differs from the official code in: that code stores the last scale too (10521 tokens instead of 6425 for Infinity at
    one megapixel), which does not affect the result.
    """

    static: ClassVar[bool] = True
    budgeted = False  # everything fits

    def keep(self, view: View) -> None:
        """Keep everything: return None."""
        return
