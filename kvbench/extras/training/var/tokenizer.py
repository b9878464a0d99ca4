"""Training of the small multi-scale VQ tokenizer: an autoencoder, codes from k-means, then the decoder of codes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.extras.training import autoencoder
from kvbench.extras.training.autoencoder import AutoencoderRecipe, draw_last_scales, find_codes, start
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

    @property
    def encoder_steps(self) -> int:
        """First steps, in which the encoder learns."""
        return self.free


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
    """Return the loss function of a step; see `autoencoder.make_loss` for the arguments.

    Unlike in VAR (arXiv:2404.02905, section 3.2) codes are not learnt by gradients, because latents would move away and
    leave most of a small codebook unused. There is no adversarial and no perceptual loss.
    """
    book = vq.quantize.embedding.weight

    @torch.no_grad()
    def find(encode_batches: Callable[[int], Tensor], rng: torch.Generator) -> None:
        latents = encode_batches(CODEBOOK_BATCHES)
        for search in range(KMEANS_ROUNDS):
            residuals = [residual for residual, _ in walk_scales(vq, latents, sizes, exact=not search)]
            vectors = torch.cat([residual.movedim(1, -1).flatten(0, 2) for residual in residuals])
            book.copy_(find_codes(vectors.cpu(), len(book), rng))

    def quantise(latents: Tensor, step: int, rng: torch.Generator) -> tuple[Tensor, float]:
        if step >= recipe.free:
            return vq.encode(latents, sizes)[1], 0.0
        sums = torch.stack([summed for _, summed in walk_scales(vq, latents, sizes, exact=True)])
        last = draw_last_scales(recipe, recipe.prefix, recipe.longest_prefix, len(sizes), rng)
        noise = torch.randn(latents.shape, generator=rng).to(latents.device)
        summed = sums[last.to(latents.device), torch.arange(recipe.batch, device=latents.device)]
        return summed + recipe.noise * latents.detach().std() * noise, 0.0

    coders = vq.latents, nn.Sequential(vq.post_quant_conv, vq.decoder)
    found = recipe.free, find
    return autoencoder.make_loss(coders, images, recipe, book.device, quantise, found, compiled=compiled)


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
