"""Training of the small multi-scale VQ tokenizer: an autoencoder, codes found by k-means, a decoder that reads them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.models.parts.autoencoder import Size
from kvbench.models.var.tokenizer import VQVAE, VQConfig, shrink
from kvbench.training.autoencoder import (
    AutoencoderRecipe,
    compile_parts,
    draw_images,
    draw_latents,
    encode_latents,
    start,
)
from kvbench.training.codes import find_codes
from kvbench.training.loop import generator
from kvbench.training.scenes import reconstruction_loss

LOOKED_AT = 24
"""Batches whose residuals k-means looks at."""
SEARCHES = 2
"""Searches for codes, each among the residuals that the codes before leave."""


@dataclass(frozen=True)
class VARTokenizerRecipe(AutoencoderRecipe):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for those that are not listed.

    Attributes:
        free: steps before there is a codebook, whose latents are disturbed instead; the encoder learns in no others.
        noise: standard deviation of that disturbance, as a share of the latents' own.
        prefix: share of each such batch decoded from its first scales only, so that these describe the whole picture.
        longest_prefix: the most scales such a prefix has.
    """

    steps: int = 1600
    free: int = 900
    noise: float = 0.1
    prefix: float = 0.5
    longest_prefix: int = 7


def make_tokenizer(config: VQConfig, seed: int) -> VQVAE:
    """Build a tokenizer to train: drawn from a seed, branches closed, codes that no gradient moves.

    Every scale's convolution is the identity and stays it, so that scales add up to what they quantise.
    """
    vq = start(lambda: VQVAE(config), seed)
    vq.quantize.requires_grad_(False)
    for name, parameter in vq.quantize.quant_resi.named_parameters():
        (nn.init.dirac_ if name.endswith("weight") else nn.init.zeros_)(parameter)
    return vq


def make_loss(
    vq: VQVAE, images: Tensor, sizes: Sequence[Size], recipe: VARTokenizerRecipe, *, compiled: bool
) -> Callable[[int], Tensor]:
    """Return the loss of a step, which draws everything random from the number of the step.

    Unlike VAR's (arXiv:2404.02905, section 3.2) codes are not learnt by gradients: latents that move away from them
    leave most of a small codebook unused. There is no adversarial and no perceptual loss.

    Args:
        vq: of `make_tokenizer`, on the device to train on.
        images: uint8 [N, H, W, 3] on the CPU.
        sizes: (h, w) of every scale.
        recipe: settings.
        compiled: use torch.compile, which needs a C++ compiler.
    """
    book = vq.quantize.embedding.weight
    encode, decode = compile_parts(
        vq.latents, nn.Sequential(vq.post_quant_conv, vq.decoder), compiled=compiled
    )

    @torch.no_grad()
    def find(rng: torch.Generator) -> None:
        latents = draw_latents(encode, images, recipe, rng, book.device, LOOKED_AT)
        for search in range(SEARCHES):
            residuals = [residual for residual, _ in walk_scales(vq, latents, sizes, exact=not search)]
            vectors = torch.cat([residual.movedim(1, -1).flatten(0, 2) for residual in residuals])
            book.copy_(find_codes(vectors.cpu(), len(book), rng))

    def loss(step: int) -> Tensor:
        rng = generator(recipe.seed, 0, step)
        if step == recipe.free:
            find(rng)
        batch = draw_images(images, recipe, rng, book.device)
        learning = step < recipe.free
        with torch.autocast(book.device.type, torch.bfloat16), torch.set_grad_enabled(learning):
            latents = encode(batch)
        latents = latents.float()
        if learning:
            sums = torch.stack([summed for _, summed in walk_scales(vq, latents, sizes, exact=True)])
            last = torch.randint(recipe.longest_prefix, (recipe.batch,), generator=rng)
            whole = torch.rand(recipe.batch, generator=rng) >= recipe.prefix
            last = torch.where(whole, len(sizes) - 1, last).to(latents.device)
            noise = torch.randn(latents.shape, generator=rng).to(latents.device)
            summed = sums[last, torch.arange(recipe.batch, device=latents.device)]
            summed = summed + recipe.noise * latents.detach().std() * noise
        else:
            _, summed = vq.encode(latents, sizes)
        with torch.autocast(book.device.type, torch.bfloat16):
            decoded = decode(summed)
        return reconstruction_loss(decoded.float(), batch)

    return loss


def walk_scales(
    vq: VQVAE, latents: Tensor, sizes: Sequence[Size], *, exact: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield of every scale what it is to quantise, and the sum of codes after it.

    Args:
        vq: the tokenizer.
        latents: float32 [B, channels, H, W].
        sizes: (h, w) of every scale.
        exact: nothing is lost in a scale but what its size cannot hold, as if there were a code for everything.

    Yields:
        The residual [B, channels, h, w] and the sum [B, channels, H, W].
    """
    summed = torch.zeros_like(latents)
    for scale, size in enumerate(sizes):
        residual = shrink(latents - summed, size)
        codes = residual.movedim(1, -1) if exact else vq.codes(vq.nearest(residual))
        summed = vq.add(summed, codes, scale, len(sizes))
        yield residual, summed


@torch.inference_mode()
def encode(vq: VQVAE, images: Tensor, batch: int = 256) -> Tensor:
    """Return the latents float16 [N, channels, h, w] of uint8 [N, H, W, 3] images, both on the CPU."""
    device = vq.quantize.embedding.weight.device
    return encode_latents(vq.latents, images, vq.config.networks, device, batch)
