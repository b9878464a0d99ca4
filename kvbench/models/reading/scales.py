"""Images that are read with forced tokens: scales, and groups of tokens."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.models.base import Cache
from kvbench.models.noise import Noise
from kvbench.models.reading.base import OwnReadable, PassedText
from kvbench.models.reading.compare import unpack_bits


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

    def list_images(self) -> list[PassedText]:
        """Return tokens and logits of each image; the logits stand for hidden states."""
        pairs = zip(torch.cat(self._tokens, 1), torch.cat(self._logits, 1), strict=True)
        return [PassedText(tokens, logits) for tokens, logits in pairs]


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
    ) -> list[PassedText]:
        """Read the images of prompts; without `tokens` they are drawn at the same time."""
        forced = ForcedScales(tokens)
        self._draw(prompts, cache, noise, forced)
        return forced.list_images()

    def find_logits(self, states: Tensor, number: int) -> Tensor:
        """Return the logits that were recorded: guided, and of bits over their temperature, before truncation."""
        return states


def list_groups(spec: ModelSpec, tokens: int) -> tuple[int, ...]:
    """Return the tokens of each scale or row of an image; nothing for a text."""
    if spec.family == "next-scale":
        return spec.lengths
    return (spec.line,) * (tokens // spec.line) if spec.line else ()
