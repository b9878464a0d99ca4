"""Training of the tiny bitwise tokenizer on images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.extras.training import autoencoder
from kvbench.extras.training.autoencoder import AutoencoderRecipe, draw_last_scales
from kvbench.extras.training.infinity.bits import straight_through_sums
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.parts.autoencoder import Size


@dataclass(frozen=True)
class TokenizerRecipe(AutoencoderRecipe):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for the others.

    Attributes:
        prefix: share of each batch decoded from its first scales only, so that these describe the whole image.
        longest_prefix: maximum number of these scales.
        flip: highest flip probability, uniform on [0, flip] for every second sample.
    """

    hold: float = 0.4
    average: float = 0.995
    prefix: float = 0.5
    longest_prefix: int = 7
    flip: float = 0.04


def make_loss(
    model: BSQ, images: Tensor, sizes: Sequence[Size], recipe: TokenizerRecipe, *, compiled: bool
) -> Callable[[int], Tensor]:
    """Return the loss function of a step; see `autoencoder.make_loss` for the arguments."""
    device = model.amplitudes.device

    def quantise(latents: Tensor, _: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        flip = torch.rand(recipe.batch, generator=rng) * recipe.flip
        flip = flip * (torch.rand(recipe.batch, generator=rng) < 0.5)
        last = draw_last_scales(recipe, recipe.prefix, recipe.longest_prefix, len(sizes), rng)
        sums, commitment = straight_through_sums(latents, sizes, model.amplitudes, flip, rng)
        return sums[last.to(device), torch.arange(recipe.batch, device=device)], 0.1 * commitment

    coders = model.encoder, model.decoder
    return autoencoder.make_loss(coders, images, recipe, device, quantise, compiled=compiled)
