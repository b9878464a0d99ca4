"""Outputs of models: images or texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A generated text.

    Attributes:
        text: characters of the text, without the prompt.
        tokens: number of generated tokens, the end token included.
        ended: whether the model ended the text; False if it was cut at the maximum length.
    """

    text: str
    tokens: int
    ended: bool


Outputs = Tensor | Sequence[Text]
"""Outputs of a batch of prompts: images uint8 [B, H, W, 3] RGB on the CPU, or texts."""
