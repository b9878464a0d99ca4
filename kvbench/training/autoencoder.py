"""Settings, initialisation and batches shared by the trainings of all tokenizers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from kvbench.models.parts.autoencoder import NetworkConfig, close_branches
from kvbench.training.loop import Recipe
from kvbench.training.scenes import to_signed

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class AutoencoderRecipe(Recipe):
    """Settings that every tokenizer's training has; see `Recipe` for those that are not listed.

    AdamW trains the first and last convolutions and what belongs to the codes.

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


def start(make: Callable[[], Network], seed: int) -> Network:
    """Make a network to train: drawn from a seed, residual branches closed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make()
    close_branches(network)
    return network


def draw_images(
    images: Tensor, recipe: AutoencoderRecipe, rng: torch.Generator, device: torch.device
) -> Tensor:
    """Draw a batch of images uint8 [N, H, W, 3] as float32 [batch, 3, H, W] in [-1, 1], on a device."""
    index = torch.randint(len(images), (recipe.batch,), generator=rng)
    return to_signed(images[index].to(device)).contiguous(memory_format=torch.channels_last)


def compile_parts(*parts: Callable[[Tensor], Tensor], compiled: bool) -> list[Callable[[Tensor], Tensor]]:
    """Return an encoder and a decoder, compiled if asked for, which needs a C++ compiler."""
    return [torch.compile(part, dynamic=False) if compiled else part for part in parts]


@torch.no_grad()
def draw_latents(
    encode: Callable[[Tensor], Tensor],
    images: Tensor,
    recipe: AutoencoderRecipe,
    rng: torch.Generator,
    device: torch.device,
    batches: int,
) -> Tensor:
    """Encode some batches of `draw_images` in bfloat16; return their latents float32 [n, channels, h, w]."""
    with torch.autocast(device.type, torch.bfloat16):
        return torch.cat([encode(draw_images(images, recipe, rng, device)) for _ in range(batches)]).float()


def encode_latents(
    encode: Callable[[Tensor], Tensor],
    images: Tensor,
    config: NetworkConfig,
    device: torch.device,
    batch: int,
) -> Tensor:
    """Return the latents float16 [N, channels, h, w] of uint8 [N, H, W, 3] images, both on the CPU."""
    shape = (config.latents, images.shape[1] // config.patch, images.shape[2] // config.patch)
    latents = torch.empty(len(images), *shape, dtype=torch.float16)
    for some, found in encode_images(encode, images, device, batch):
        latents[some] = found
    return latents


def encode_images(
    encode: Callable[[Tensor], Tensor], images: Tensor, device: torch.device, batch: int = 256
) -> Iterator[tuple[slice, Tensor]]:
    """Encode images uint8 [N, H, W, 3] in bfloat16, some at a time; yield which ones, and their latents on the device.

    The caller fills a tensor in place: what is kept between large blocks that come and go would hold them apart.
    """
    for first in range(0, len(images), batch):
        some = slice(first, first + batch)
        with torch.autocast(device.type, torch.bfloat16):
            latents = encode(to_signed(images[some].to(device)))
        yield some, latents
