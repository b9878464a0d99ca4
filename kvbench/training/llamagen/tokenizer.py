"""Training of the small VQ tokenizer on rendered scenes: first without a codebook, then with one found by k-means."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.models.llamagen.tokenizer import VQ
from kvbench.training.autoencoder import AutoencoderRecipe, draw_images, encode_images, fit_tokenizer
from kvbench.training.codes import find_codes
from kvbench.training.loop import generator
from kvbench.training.scenes import reconstruction_loss


@dataclass(frozen=True)
class VQRecipe(AutoencoderRecipe):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for those that are not listed.

    Attributes:
        free: steps before there is a codebook, whose latents are disturbed instead.
        noise: standard deviation of that disturbance, per channel of a latent of unit length.
        commitment: weight of the distance from latents to their codes (LlamaGen section 3.1, beta).
    """

    free: int = 600
    noise: float = 0.05
    commitment: float = 0.25


def train_vq(model: VQ, images: Tensor, recipe: VQRecipe, path: Path, *, compiled: bool) -> dict[str, Tensor]:
    """Train the tokenizer in place and return its averaged weights by name.

    Latents lie on the unit sphere and gradients pass a code as if it were its latent (LlamaGen, arXiv:2406.06525,
    section 3.1; no adversarial and no perceptual loss).

    Args:
        model: freshly initialised, on the device to train on.
        images: uint8 [N, H, W, 3] on the CPU.
        recipe: settings.
        path: checkpoint file, read when it exists.
        compiled: use torch.compile, which needs a C++ compiler.

    Raises:
        ValueError, FloatingPointError: see `fit`.
    """
    book = model.quantize.embedding.weight
    encode, decode = (
        torch.compile(part, dynamic=False) if compiled else part for part in (model.latents, model.decode)
    )

    @torch.no_grad()
    def found(rng: torch.Generator) -> Tensor:
        with torch.autocast(book.device.type, torch.bfloat16):
            latents = torch.cat(
                [encode(draw_images(images, recipe, rng, book.device)) for _ in range(32)]
            ).float()
        vectors = F.normalize(latents.movedim(1, -1).flatten(0, 2), dim=-1).cpu()
        return find_codes(vectors, len(book), rng, sphere=True)

    def loss(step: int) -> Tensor:
        rng = generator(recipe.seed, 0, step)
        if step == recipe.free:
            book.data.copy_(found(rng))
        batch = draw_images(images, recipe, rng, book.device)
        with torch.autocast(book.device.type, torch.bfloat16):
            latents = F.normalize(encode(batch).float(), dim=1)
        if step < recipe.free:
            disturbed = latents + recipe.noise * torch.randn(latents.shape, generator=rng).to(latents.device)
            codes, distance = F.normalize(disturbed, dim=1), latents.new_zeros(())
        else:
            nearest = model.codes(model.encode(latents.detach()))
            distance = (nearest - latents.detach()).square().sum(1).mean()
            distance = distance + recipe.commitment * (latents - nearest.detach()).square().sum(1).mean()
            codes = latents + (nearest - latents).detach()
        with torch.autocast(book.device.type, torch.bfloat16):
            decoded = decode(codes)
        return reconstruction_loss(decoded.float(), batch) + distance

    return fit_tokenizer(model, recipe, loss, path)


@torch.inference_mode()
def encode(model: VQ, images: Tensor, batch: int = 256) -> Tensor:
    """Return the tokens int16 [N, h w] of uint8 [N, H, W, 3] images, both on the CPU."""
    device = model.quantize.embedding.weight.device
    cells = images.shape[1] * images.shape[2] // model.patch**2
    tokens = torch.empty(len(images), cells, dtype=torch.int16)
    for some, latents in encode_images(model.latents, images, device, batch):
        tokens[some] = model.encode(latents.float()).flatten(1)
    return tokens
