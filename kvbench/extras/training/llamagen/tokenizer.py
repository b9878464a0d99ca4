"""Training of the small VQ tokenizer on scenes, first without a codebook, then with one from k-means."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.extras.training import autoencoder
from kvbench.extras.training.autoencoder import AutoencoderRecipe, encode_images, find_codes
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
    """Return the loss function of a step; see `autoencoder.make_loss` for the arguments.

    Latents have unit length and gradients pass through codes to their latents (LlamaGen, arXiv:2406.06525, section 3.1;
    no adversarial and no perceptual loss).
    """
    book = model.quantize.embedding.weight

    def find(encode_batches: Callable[[int], Tensor], rng: torch.Generator) -> None:
        vectors = encode_batches(CODEBOOK_BATCHES).movedim(1, -1).flatten(0, 2)
        book.data.copy_(find_codes(F.normalize(vectors, dim=-1).cpu(), len(book), rng, sphere=True))

    def quantise(latents: Tensor, step: int, rng: torch.Generator) -> tuple[Tensor, Tensor | float]:
        latents = F.normalize(latents, dim=1)
        if step < recipe.free:
            noise = torch.randn(latents.shape, generator=rng).to(latents.device)
            return F.normalize(latents + recipe.noise * noise, dim=1), 0.0
        nearest = model.codes(model.encode(latents.detach()))
        distance = (nearest - latents.detach()).square().sum(1).mean()
        distance = distance + recipe.commitment * (latents - nearest.detach()).square().sum(1).mean()
        return latents + (nearest - latents).detach(), distance

    coders, found = (model.latents, model.decode), (recipe.free, find)
    return autoencoder.make_loss(coders, images, recipe, book.device, quantise, found, compiled=compiled)


@torch.inference_mode()
def encode(model: VQ, images: Tensor, batch: int = 256) -> Tensor:
    """Return the tokens int16 [N, h w] of images uint8 [N, H, W, 3], both on the CPU."""
    device = model.quantize.embedding.weight.device
    cells = images.shape[1] * images.shape[2] // model.patch**2
    tokens = torch.empty(len(images), cells, dtype=torch.int16)
    for rows, latents in encode_images(model.latents, images, device, batch):
        tokens[rows] = model.encode(latents.float()).flatten(1)
    return tokens
