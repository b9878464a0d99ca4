"""Outputs of models: images or texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text that a model wrote.

    Attributes:
        text: without the prompt.
        tokens: how many were drawn, the one that ends the text included.
        ended: whether the text came to its end; otherwise it was cut at the most tokens it may have.
    """

    text: str
    tokens: int
    ended: bool


Outputs = Tensor | Sequence[Text]
"""Of a batch of prompts: images uint8 [B, H, W, 3] RGB on the CPU, or a text each."""
