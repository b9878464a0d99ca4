"""Training of the small VQ tokenizer on scenes, first without a codebook, then with one from k-means."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.extras.training.autoencoder import (
    AutoencoderRecipe,
    compile_parts,
    draw_images,
    draw_latents,
    encode_images,
)
from kvbench.extras.training.codes import find_codes
from kvbench.extras.training.loop import generator
from kvbench.extras.training.precision import autocast
from kvbench.extras.training.scenes import reconstruction_loss
from kvbench.models.llamagen.tokenizer import VQ

CODEBOOK_BATCHES = 32
"""Number of batches for k-means."""


@dataclass(frozen=True)
class VQRecipe(AutoencoderRecipe):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for the others.

    Attributes:
        free: steps without a codebook, in which noise is added to latents.
        noise: standard deviation of this noise, per channel of a latent of unit length.
        commitment: weight of the distance from latents to their codes (LlamaGen section 3.1, beta).
    """

    free: int = 600
    noise: float = 0.05
    commitment: float = 0.25


def make_loss(model: VQ, images: Tensor, recipe: VQRecipe, *, compiled: bool) -> Callable[[int], Tensor]:
    """Return the loss function of a step, whose randomness depends on the step number alone.

    Latents have unit length and gradients pass through codes to their latents (LlamaGen, arXiv:2406.06525, section 3.1;
    no adversarial and no perceptual loss). The model is newly initialised on its device; images are uint8 [N, H, W, 3]
    on the CPU.
    """
    book = model.quantize.embedding.weight
    encode, decode = compile_parts(model.latents, model.decode, compiled=compiled)

    def loss(step: int) -> Tensor:
        rng = generator(recipe.seed, 0, step)
        if step == recipe.free:
            latents = draw_latents(encode, images, recipe, rng, book.device, CODEBOOK_BATCHES)
            vectors = F.normalize(latents.movedim(1, -1).flatten(0, 2), dim=-1).cpu()
            book.data.copy_(find_codes(vectors, len(book), rng, sphere=True))
        batch = draw_images(images, recipe, rng, book.device)
        with autocast(book.device):
            latents = F.normalize(encode(batch).float(), dim=1)
        if step < recipe.free:
            noisy = latents + recipe.noise * torch.randn(latents.shape, generator=rng).to(latents.device)
            codes, distance = F.normalize(noisy, dim=1), latents.new_zeros(())
        else:
            nearest = model.codes(model.encode(latents.detach()))
            distance = (nearest - latents.detach()).square().sum(1).mean()
            distance = distance + recipe.commitment * (latents - nearest.detach()).square().sum(1).mean()
            codes = latents + (nearest - latents).detach()
        with autocast(book.device):
            decoded = decode(codes)
        return reconstruction_loss(decoded.float(), batch) + distance

    return loss


@torch.inference_mode()
def encode(model: VQ, images: Tensor, batch: int = 256) -> Tensor:
    """Return the tokens int16 [N, h w] of images uint8 [N, H, W, 3], both on the CPU."""
    device = model.quantize.embedding.weight.device
    cells = images.shape[1] * images.shape[2] // model.patch**2
    tokens = torch.empty(len(images), cells, dtype=torch.int16)
    for rows, latents in encode_images(model.latents, images, device, batch):
        tokens[rows] = model.encode(latents.float()).flatten(1)
    return tokens
