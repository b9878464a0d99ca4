"""Passes of a model over its own outputs, whose tokens are given: the models that have them, and images of scales."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.forced.compare import unpack_bits
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise


class ForcedPass(NamedTuple):
    """A text, or the tokens of an image, after a pass of the model.

    Attributes:
        tokens: int64 [n], its scored tokens, or bool [n, bits].
        states: hidden states [n, ...] that predict them.
    """

    tokens: Tensor
    states: Tensor


class OwnReadable(Model, ABC):
    """Base class of models that can read what they have drawn."""

    @abstractmethod
    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Read the outputs of prompts, which are drawn first if `tokens` is None.

        Args:
            prompts: a batch of prompts.
            cache: cache of keys and values.
            noise: randomness, per prompt, of the draw.
            tokens: tokens int64 [n] of each output; None to draw them.

        Raises:
            ValueError: the model's sampling does not draw tokens.
        """

    @abstractmethod
    def find_logits(self, states: Tensor, number: int) -> Tensor:
        """Return logits float32 [n, vocabulary], or [n, bits, 2], of hidden states [n, ...].

        `number` is the number of the first token among those that are scored.
        """

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the characters of each token; nothing for an image."""
        return ()


class ForcedScales:
    """Tokens of a batch of images, scale by scale: drawn, or given. Logits and tokens are recorded.

    Args:
        tokens: tokens int64 [cells of all scales] of each image; None to draw them.
    """

    def __init__(self, tokens: Sequence[Tensor] | None) -> None:
        self._given = None if tokens is None else torch.stack(list(tokens))
        self._tokens: list[Tensor] = []
        self._logits: list[Tensor] = []

    def choose(self, segment: Segment, logits: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        """Return the tokens of a scale, int64 [images, t] or bool [images, t, bits].

        Args:
            segment: the scale.
            logits: float32 [images, t, codes] or [images, t, bits, 2]; a recording may overwrite them later.
            draw: draws the tokens.
        """
        if self._given is None:
            tokens = draw()
        else:
            tokens = self._given[:, segment.start : segment.end].to(logits.device)
            if logits.ndim > 3:
                tokens = unpack_bits(tokens, logits.shape[2])
        self._logits.append(logits.clone())
        self._tokens.append(tokens)
        return tokens

    def list_images(self) -> list[ForcedPass]:
        """Return tokens and logits of each image; the logits stand for hidden states."""
        pairs = zip(torch.cat(self._tokens, 1), torch.cat(self._logits, 1), strict=True)
        return [ForcedPass(tokens, logits) for tokens, logits in pairs]


class ReadableScales(OwnReadable):
    """Base class of next-scale models, which read an image's tokens scale by scale."""

    @abstractmethod
    def _draw(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, forced: ForcedScales | None = None
    ) -> Tensor:
        """Draw the latents of a batch, float32 [B, channels, h, w], by way of `forced` if it is given."""

    @torch.inference_mode()
    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Read the images of prompts; without `tokens` they are drawn at the same time."""
        forced = ForcedScales(tokens)
        self._draw(prompts, cache, noise, forced)
        return forced.list_images()

    def find_logits(self, states: Tensor, number: int) -> Tensor:
        """Return the logits that were recorded: guided, and of bits over their temperature, before truncation."""
        return states
