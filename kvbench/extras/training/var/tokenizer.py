"""Training of the small multi-scale VQ tokenizer: an autoencoder, codes from k-means, then the decoder of codes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.extras.training.autoencoder import (
    AutoencoderRecipe,
    compile_parts,
    draw_images,
    draw_latents,
    encode_latents,
    start,
)
from kvbench.extras.training.codes import find_codes
from kvbench.extras.training.loop import generator
from kvbench.extras.training.precision import autocast
from kvbench.extras.training.scenes import reconstruction_loss
from kvbench.models.parts.autoencoder import Size
from kvbench.models.var.tokenizer import VQVAE, VQConfig, shrink

CODEBOOK_BATCHES = 24
"""Number of batches for k-means."""
KMEANS_ROUNDS = 2
"""Number of runs of k-means, each on the residuals under the previous codes."""


@dataclass(frozen=True)
class VARTokenizerRecipe(AutoencoderRecipe):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for the others.

    Attributes:
        free: steps without a codebook, in which the encoder learns and noise is added to latents.
        noise: standard deviation of this noise, as a share of the latents' deviation.
        prefix: share of each such batch decoded from its first scales only, so that these describe the whole image.
        longest_prefix: maximum number of these scales.
    """

    steps: int = 1600
    free: int = 900
    noise: float = 0.1
    prefix: float = 0.5
    longest_prefix: int = 7


def make_tokenizer(config: VQConfig, seed: int) -> VQVAE:
    """Build a tokenizer to train: random weights from a seed, closed branches, codes without gradients.

    The convolutions of scales are and stay the identity, so that scales add up to what they quantise.
    """
    vq = start(lambda: VQVAE(config), seed)
    vq.quantize.requires_grad_(False)
    for name, parameter in vq.quantize.quant_resi.named_parameters():
        (nn.init.dirac_ if name.endswith("weight") else nn.init.zeros_)(parameter)
    return vq


def make_loss(
    vq: VQVAE, images: Tensor, sizes: Sequence[Size], recipe: VARTokenizerRecipe, *, compiled: bool
) -> Callable[[int], Tensor]:
    """Return the loss function of a step, whose randomness depends on the step number alone.

    Unlike in VAR (arXiv:2404.02905, section 3.2) codes are not learnt by gradients, because latents would move away and
    leave most of a small codebook unused. There is no adversarial and no perceptual loss. Images are uint8
    [N, H, W, 3] on the CPU.
    """
    book = vq.quantize.embedding.weight
    encode, decode = compile_parts(
        vq.latents, nn.Sequential(vq.post_quant_conv, vq.decoder), compiled=compiled
    )

    @torch.no_grad()
    def find(rng: torch.Generator) -> None:
        latents = draw_latents(encode, images, recipe, rng, book.device, CODEBOOK_BATCHES)
        for search in range(KMEANS_ROUNDS):
            residuals = [residual for residual, _ in walk_scales(vq, latents, sizes, exact=not search)]
            vectors = torch.cat([residual.movedim(1, -1).flatten(0, 2) for residual in residuals])
            book.copy_(find_codes(vectors.cpu(), len(book), rng))

    def loss(step: int) -> Tensor:
        rng = generator(recipe.seed, 0, step)
        if step == recipe.free:
            find(rng)
        batch = draw_images(images, recipe, rng, book.device)
        is_free = step < recipe.free
        with autocast(book.device), torch.set_grad_enabled(is_free):
            latents = encode(batch)
        latents = latents.float()
        if is_free:
            sums = torch.stack([summed for _, summed in walk_scales(vq, latents, sizes, exact=True)])
            last = torch.randint(recipe.longest_prefix, (recipe.batch,), generator=rng)
            whole = torch.rand(recipe.batch, generator=rng) >= recipe.prefix
            last = torch.where(whole, len(sizes) - 1, last).to(latents.device)
            noise = torch.randn(latents.shape, generator=rng).to(latents.device)
            summed = sums[last, torch.arange(recipe.batch, device=latents.device)]
            summed = summed + recipe.noise * latents.detach().std() * noise
        else:
            _, summed = vq.encode(latents, sizes)
        with autocast(book.device):
            decoded = decode(summed)
        return reconstruction_loss(decoded.float(), batch)

    return loss


def walk_scales(
    vq: VQVAE, latents: Tensor, sizes: Sequence[Size], *, exact: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each scale's residual [B, channels, h, w] and the sum of codes after it [B, channels, H, W].

    Latents are float32 [B, channels, H, W]. With `exact` the codes are the residuals themselves.
    """
    summed = torch.zeros_like(latents)
    for scale, size in enumerate(sizes):
        residual = shrink(latents - summed, size)
        codes = residual.movedim(1, -1) if exact else vq.codes(vq.nearest(residual))
        summed = vq.add(summed, codes, scale, len(sizes))
        yield residual, summed


@torch.inference_mode()
def encode(vq: VQVAE, images: Tensor, batch: int = 256) -> Tensor:
    """Return the latents float16 [N, channels, h, w] of images uint8 [N, H, W, 3], both on the CPU."""
    device = vq.quantize.embedding.weight.device
    return encode_latents(vq.latents, images, vq.config.networks, device, batch)
