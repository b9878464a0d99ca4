"""Outputs of models: images, texts, or readings of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text that a model wrote.

    Attributes:
        text: without the prompt.
        tokens: number of tokens drawn, the end token included.
        ended: whether the model ended the text; False if it was cut at the maximum length.
    """

    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class ReadText:
    """Scored tokens of a text that was read, each with the predictions of the tokens before it.

    Attributes:
        tokens: int32 [n], the text's own tokens.
        likeliest: int32 [n], the likeliest token under the method.
        likeliest_full: int32 [n], the likeliest token under the full cache.
        kl: float32 [n], KL(full || method) in nats.
        nll: float32 [n], negative log-probability of the own token under the method, in nats.
        nll_full: float32 [n], the same under the full cache.
        words: characters of every token that occurs, by its number; empty for an image.
        groups: tokens of each scale, or of each row, of an image; empty for a text.
        states: hidden states [n, ...] of the full cache's reading, which others are compared with; None under a method.
        drawn: tokens of the model's own output, whose length is not known in advance; None for a given text.
    """

    tokens: Tensor
    likeliest: Tensor
    likeliest_full: Tensor
    kl: Tensor
    nll: Tensor
    nll_full: Tensor
    words: Mapping[int, str] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    states: Tensor | None = None
    drawn: int | None = None


Outputs = Tensor | Sequence[Text] | Sequence[ReadText]
"""Outputs of a batch of prompts: images uint8 [B, H, W, 3] RGB on the CPU, texts, or texts that were read."""


def count_drawn(outputs: Outputs, number: int) -> int | None:
    """Return the tokens of a text of a batch that the model drew; None for other outputs."""
    output = outputs[number]
    if isinstance(output, Text):
        return output.tokens
    return output.drawn if isinstance(output, ReadText) else None
