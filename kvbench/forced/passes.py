"""Passes over given tokens of a model's own outputs: base classes of models, and images scale by scale."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.forced.compare import unpack_bits
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise


class ForcedPass(NamedTuple):
    """Result of one pass of a model over a text or an image.

    Attributes:
        tokens: scored tokens, int64 [n] or bool [n, bits].
        states: hidden states [n, ...] that predict the tokens.
    """

    tokens: Tensor
    states: Tensor


class OwnReadable(Model):
    """Base class of models with forced decoding of their own outputs."""

    @abstractmethod
    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over the outputs of prompts, which are sampled if `tokens` is None.

        Args:
            prompts: a batch of prompts.
            cache: cache of keys and values.
            noise: randomness per prompt, for sampling.
            tokens: int64 [n], tokens of each output; None to sample them.

        Raises:
            ValueError: the model's sampling does not give tokens.
        """

    @abstractmethod
    def find_logits(self, states: Tensor, first: int) -> Tensor:
        """Return logits float32 [n, vocabulary], or [n, bits, 2], of hidden states [n, ...].

        `first` is the index of their first token among the scored ones.
        """

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the characters of each token; an empty tuple for images."""
        return ()


class ForcedScales:
    """Tokens of a batch of images, sampled or given scale by scale, with a record of tokens and logits.

    Args:
        tokens: int64 [tokens of all scales] of each image; None to sample them.
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
            draw: samples the tokens.
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
        """Return tokens of each image, with logits in place of hidden states."""
        pairs = zip(torch.cat(self._tokens, 1), torch.cat(self._logits, 1), strict=True)
        return [ForcedPass(tokens, logits) for tokens, logits in pairs]


class ReadableScales(OwnReadable):
    """Base class of next-scale models with forced decoding of their images."""

    @abstractmethod
    def _draw(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, forced: ForcedScales | None = None
    ) -> Tensor:
        """Return the latents of a batch, float32 [B, channels, h, w]; `forced` chooses the tokens if it is given."""

    @torch.inference_mode()
    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over the images of prompts; without `tokens` they are sampled in the same pass."""
        forced = ForcedScales(tokens)
        self._draw(prompts, cache, noise, forced)
        return forced.list_images()

    def find_logits(self, states: Tensor, first: int) -> Tensor:
        """Return the recorded logits: guided, divided by the temperature if of bits, and not truncated."""
        return states
