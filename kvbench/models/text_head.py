"""Draw of texts: each token, and the end of a text, after which others of its batch go on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.models.noise import Noise
from kvbench.models.parts.text_sampling import TextSampling, draw_text_token
from kvbench.models.parts.token_steps import DrawnTokens
from kvbench.models.token_loop import Head

CHECK_INTERVAL = 16
"""Tokens between two checks whether all texts have ended, in which the host waits for a GPU."""


@dataclass(frozen=True)
class DrawnTexts(DrawnTokens):
    """Tokens of a batch of texts; values after a text's end have no meaning.

    Attributes:
        running: bool [prompts], texts that have not ended.
        lengths: int64 [prompts], tokens of each text so far, its end included.
        ends: int64 [ends], tokens that end a text.
    """

    running: Tensor
    lengths: Tensor
    ends: Tensor

    def rows(self) -> list[list[int]]:
        """Return the tokens of each text as lists on the host, up to its end."""
        lengths = self.lengths.tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


class TextHead(Head[DrawnTexts]):
    """Draws the tokens of texts; an ended text continues with `pad` until all texts or all segments have ended.

    Args:
        sampling: temperature and truncation.
        ends: tokens that end a text; without any, every text has the maximum length.
        pad: token that follows an end.
    """

    def __init__(self, sampling: TextSampling, ends: Sequence[int], pad: int) -> None:
        self.numbers = sampling.numbers
        self._sampling, self._ends, self._pad = sampling, list(ends), pad

    def begin(self, drawn: DrawnTokens) -> DrawnTexts:
        """Return the state of a batch of texts, none of which has ended."""
        running = torch.ones_like(drawn.last, dtype=torch.bool)
        ends = torch.tensor(self._ends, dtype=torch.int64, device=drawn.last.device)
        return DrawnTexts(**vars(drawn), running=running, lengths=torch.zeros_like(drawn.last), ends=ends)

    def draw(self, drawn: DrawnTexts, logits: Tensor, number: int, noise: Noise, *inputs: Tensor) -> Tensor:
        """Draw the next token of each text, `pad` after its end."""
        token = torch.where(drawn.running, draw_text_token(logits, self._sampling, noise), self._pad)
        drawn.lengths.add_(drawn.running)
        drawn.running.logical_and_(~torch.isin(token, drawn.ends))
        return drawn.add(token, logits.sum(-1))

    def has_ended(self, drawn: DrawnTexts, count: int) -> bool:
        """Return whether all texts have ended, as far as the host looks."""
        return count % CHECK_INTERVAL == 0 and not drawn.running.any()
