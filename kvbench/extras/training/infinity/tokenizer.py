"""Training of the tiny bitwise tokenizer on images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.extras.training.autoencoder import AutoencoderRecipe, compile_parts, draw_images, encode_latents
from kvbench.extras.training.infinity.bits import straight_through_sums
from kvbench.extras.training.loop import generator
from kvbench.extras.training.precision import autocast
from kvbench.extras.training.scenes import reconstruction_loss
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
    """Return the loss function of a step, whose randomness depends on the step number alone.

    The model is newly initialised on its device; images are uint8 [N, H, W, 3] on the CPU.
    """
    device = model.amplitudes.device
    encode, decode = compile_parts(model.encoder, model.decoder, compiled=compiled)

    def loss(step: int) -> Tensor:
        rng = generator(recipe.seed, 0, step)
        batch = draw_images(images, recipe, rng, device)
        flip = torch.rand(recipe.batch, generator=rng) * recipe.flip
        flip = flip * (torch.rand(recipe.batch, generator=rng) < 0.5)
        last = torch.randint(recipe.longest_prefix, (recipe.batch,), generator=rng)
        whole = torch.rand(recipe.batch, generator=rng) >= recipe.prefix
        last = torch.where(whole, len(sizes) - 1, last)
        with autocast(device):
            latents = encode(batch)
        sums, commitment = straight_through_sums(latents.float(), sizes, model.amplitudes, flip, rng)
        with autocast(device):
            decoded = decode(sums[last.to(device), torch.arange(recipe.batch, device=device)])
        return reconstruction_loss(decoded.float(), batch) + 0.1 * commitment

    return loss


@torch.inference_mode()
def encode(model: BSQ, images: Tensor, batch: int = 256) -> Tensor:
    """Return the latents float16 [N, d, h, w] of images uint8 [N, H, W, 3], both on the CPU."""
    return encode_latents(model.encoder, images, model.config.networks, model.amplitudes.device, batch)
