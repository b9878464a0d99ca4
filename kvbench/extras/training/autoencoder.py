"""Settings, initialisation and batches of the trainings of all tokenizers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from kvbench.extras.training.loop import Recipe
from kvbench.extras.training.precision import autocast
from kvbench.extras.training.scenes import to_signed
from kvbench.models.parts.autoencoder import NetworkConfig, close_branches

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


def start(make: Callable[[], Network], seed: int) -> Network:
    """Build a network to train, with random weights from a seed and closed residual branches."""
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
    """Return an encoder and a decoder, compiled on request, which needs a C++ compiler."""
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
    """Encode batches of `draw_images` in bfloat16 and return their latents float32 [n, channels, h, w]."""
    with autocast(device):
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
    for rows, encoded in encode_images(encode, images, device, batch):
        latents[rows] = encoded
    return latents


def encode_images(
    encode: Callable[[Tensor], Tensor], images: Tensor, device: torch.device, batch: int = 256
) -> Iterator[tuple[slice, Tensor]]:
    """Encode batches of images uint8 [N, H, W, 3] in bfloat16; yield their rows, and their latents on the device.

    The caller copies them into one tensor, because small tensors between large blocks fragment memory.
    """
    for first in range(0, len(images), batch):
        rows = slice(first, first + batch)
        with autocast(device):
            latents = encode(to_signed(images[rows].to(device)))
        yield rows, latents
