"""Training of all tokenizers: settings, initialisation, the loss of a step, codebooks by k-means++, and encoding."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.extras.training.loop import Recipe, generator
from kvbench.extras.training.precision import autocast
from kvbench.extras.training.scenes import reconstruction_loss, to_signed
from kvbench.models.parts.autoencoder import NetworkConfig, close_branches

MAX_VECTORS = 2**17
"""Maximum number of vectors for k-means, drawn from all."""

Quantise = Callable[[Tensor, int, torch.Generator], tuple[Tensor, Tensor | float]]
"""Returns what a step decodes of latents float32 [B, channels, h, w], and what it adds to the loss."""
Encode = Callable[[Tensor], Tensor]
Find = Callable[[Callable[[int], Tensor], torch.Generator], None]
"""Fills a codebook; its first argument encodes a number of batches, latents float32 [n, channels, h, w]."""
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class AutoencoderRecipe(Recipe):
    """Settings of every tokenizer's training; see `Recipe` for the others.

    AdamW trains the first and last convolutions and the parameters of the codes.

    Attributes:
        steps: optimiser steps.
        batch: images per step.
        hold: share of the steps at the peak rate.
    """

    outer: ClassVar[tuple[str, ...]] = ("conv_in", "conv_out", "quant")
    steps: int = 2000
    batch: int = 32
    muon: float = 0.012
    adamw: float = 1.5e-3
    average: float = 0.99
    hold: float = 0.5

    @property
    def encoder_steps(self) -> int:
        """First steps, in which the encoder learns."""
        return self.steps


def start(make: Callable[[], Network], seed: int) -> Network:
    """Build a network to train, with random weights from a seed and closed residual branches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make()
    close_branches(network)
    return network


def make_loss(
    coders: tuple[Encode, Encode],
    images: Tensor,
    recipe: AutoencoderRecipe,
    device: torch.device,
    quantise: Quantise,
    find: tuple[int, Find] | None = None,
    *,
    compiled: bool,
) -> Callable[[int], Tensor]:
    """Return the loss function of a step, whose randomness depends on the step number alone.

    Args:
        coders: encoder and decoder, newly initialised on the device.
        images: uint8 [N, H, W, 3] on the CPU.
        recipe: settings.
        device: where to train.
        quantise: what stands between encoder and decoder.
        find: step before which the codebook is found, and how; None without one.
        compiled: use torch.compile, which needs a C++ compiler.
    """
    encode, decode = (torch.compile(one, dynamic=False) if compiled else one for one in coders)

    def draw(rng: torch.Generator) -> Tensor:
        index = torch.randint(len(images), (recipe.batch,), generator=rng)
        return to_signed(images[index].to(device)).contiguous(memory_format=torch.channels_last)

    def loss(step: int) -> Tensor:
        rng = generator(recipe.seed, 0, step)

        @torch.no_grad()
        def encode_batches(count: int) -> Tensor:
            with autocast(device):
                return torch.cat([encode(draw(rng)) for _ in range(count)]).float()

        if find is not None and step == find[0]:
            find[1](encode_batches, rng)
        batch = draw(rng)
        with autocast(device), torch.set_grad_enabled(step < recipe.encoder_steps):
            latents = encode(batch)
        codes, distance = quantise(latents.float(), step, rng)
        with autocast(device):
            decoded = decode(codes)
        return reconstruction_loss(decoded.float(), batch) + distance

    return loss


def draw_last_scales(
    recipe: AutoencoderRecipe, prefix: float, longest: int, scales: int, rng: torch.Generator
) -> Tensor:
    """Draw the last decoded scale of each sample, int64 [B]: for a share `prefix`, one of the first `longest`."""
    last = torch.randint(longest, (recipe.batch,), generator=rng)
    whole = torch.rand(recipe.batch, generator=rng) >= prefix
    return torch.where(whole, scales - 1, last)


def find_codes(
    vectors: Tensor, count: int, rng: torch.Generator, *, sphere: bool = False, rounds: int = 10
) -> Tensor:
    """Return `count` codes of vectors float32 [n, channels] by k-means, seeded by k-means++ so that rare vectors count.

    With `sphere`, vectors and codes have unit length. Each of the rounds assigns vectors and takes means.
    """
    vectors = vectors[torch.randperm(len(vectors), generator=rng)[:MAX_VECTORS]]
    codes = vectors[:1]
    nearest = _distances(vectors, codes)[:, 0]
    for _ in range(count - 1):
        chosen = vectors[torch.multinomial(nearest.clamp(min=1e-9), 1, generator=rng)]
        codes = torch.cat((codes, chosen))
        nearest = torch.minimum(nearest, _distances(vectors, chosen)[:, 0])
    for _ in range(rounds):
        owner = torch.cat([_distances(chunk, codes).argmin(1) for chunk in vectors.split(2**14)])
        sums = torch.zeros_like(codes).index_add_(0, owner, vectors)
        owned = torch.bincount(owner, minlength=count)[:, None]
        means = F.normalize(sums, dim=1) if sphere else sums / owned.clamp(min=1)
        codes = torch.where(owned > 0, means, codes)
    return codes


def _distances(vectors: Tensor, codes: Tensor) -> Tensor:
    """Return squared distances [n, count]."""
    squares = vectors.square().sum(1, keepdim=True) + codes.square().sum(1)
    return squares - 2 * (vectors @ codes.T)


@torch.inference_mode()
def encode_latents(
    encode: Encode, images: Tensor, config: NetworkConfig, device: torch.device, batch: int = 256
) -> Tensor:
    """Return the latents float16 [N, channels, h, w] of uint8 [N, H, W, 3] images, both on the CPU."""
    shape = (config.latents, images.shape[1] // config.patch, images.shape[2] // config.patch)
    latents = torch.empty(len(images), *shape, dtype=torch.float16)
    for rows, encoded in encode_images(encode, images, device, batch):
        latents[rows] = encoded
    return latents


def encode_images(
    encode: Encode, images: Tensor, device: torch.device, batch: int = 256
) -> Iterator[tuple[slice, Tensor]]:
    """Encode batches of images uint8 [N, H, W, 3] in bfloat16; yield their rows, and their latents on the device.

    The caller copies them into one tensor, because small tensors between large blocks fragment memory.
    """
    for first in range(0, len(images), batch):
        rows = slice(first, first + batch)
        with autocast(device):
            latents = encode(to_signed(images[rows].to(device)))
        yield rows, latents
