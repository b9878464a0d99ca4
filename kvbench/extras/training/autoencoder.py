"""Training of all tokenizers: settings, initialisation, loss of a step, codebooks by k-means, and encoding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.extras.training.loop import Recipe, generator
from kvbench.extras.training.optim import autocast
from kvbench.models.parts.autoencoder import Size, close_branches

MAX_VECTORS = 2**17  # maximum number of vectors for k-means, sampled from all
ROUNDS = 10  # iterations of k-means
ENCODED = 256  # number of images that are encoded at once

Encode = Callable[[Tensor], Tensor]
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class AutoencoderRecipe(Recipe, ABC, Generic[Network]):
    """Base class of tokenizers' recipes; see `Recipe` for the other settings.

    AdamW trains the first and last convolutions and the parameters of the codes.

    Attributes:
        steps: optimiser steps.
        batch: images per step.
        hold: share of the steps at the peak learning rate.
    """

    outer: ClassVar[tuple[str, ...]] = ("conv_in", "conv_out", "quant")
    steps: int = 2000
    batch: int = 32
    muon: float = 0.012
    adamw: float = 1.5e-3
    average: float = 0.99
    hold: float = 0.5

    @property
    def free(self) -> int:
        """Number of first steps without a codebook, by default all steps: no codebook is searched for."""
        return self.steps

    @property
    def encoder_steps(self) -> int:
        """Number of first steps in which the encoder learns."""
        return self.steps

    def make_loss(
        self, network: Network, images: Tensor, sizes: Sequence[Size], *, compiled: bool
    ) -> Callable[[int], Tensor]:
        """Return a function from a step to its scalar loss, whose randomness depends on the step alone.

        Args:
            network: newly initialised, on the device to train on.
            images: uint8 [N, H, W, 3] on the CPU.
            sizes: (h, w) of every scale; empty for codes without scales.
            compiled: use torch.compile, which needs a C++ compiler.
        """
        coders, device = self._coders(network), next(network.parameters()).device
        encode, decode = (torch.compile(coder, dynamic=False) if compiled else coder for coder in coders)

        def draw(rng: torch.Generator) -> Tensor:
            index = torch.randint(len(images), (self.batch,), generator=rng)
            return to_signed(images[index].to(device)).contiguous(memory_format=torch.channels_last)

        def loss(step: int) -> Tensor:
            rng = generator(self.seed, 0, step)

            @torch.no_grad()
            def encode_batches(count: int) -> Tensor:
                with autocast(device):
                    return torch.cat([encode(draw(rng)) for _ in range(count)]).float()

            if step == self.free:
                self._find_codebook(network, encode_batches, sizes, rng)
            batch = draw(rng)
            with autocast(device), torch.set_grad_enabled(step < self.encoder_steps):
                latents = encode(batch)
            codes, distance = self._quantise(network, latents.float(), sizes, step, rng)
            with autocast(device):
                decoded = decode(codes)
            return reconstruction_loss(decoded.float(), batch) + distance

        return loss

    @abstractmethod
    def _coders(self, network: Network) -> tuple[Encode, Encode]:
        """Return encoder and decoder of a network."""

    @abstractmethod
    def _quantise(
        self, network: Network, latents: Tensor, sizes: Sequence[Size], step: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor | float]:
        """Return the codes that a step decodes for latents float32 [B, channels, h, w], and a term of the loss."""

    def _find_codebook(
        self, network: Network, encode: Callable[[int], Tensor], sizes: Sequence[Size], rng: torch.Generator
    ) -> None:
        """Fill the codebook before step `free`; `encode` returns latents float32 [N, channels, h, w] of n batches."""
        raise NotImplementedError


def start(make: Callable[[], Network], seed: int) -> Network:
    """Build a network to train, with random weights from a seed and closed residual branches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make()
    close_branches(network)
    return network


def to_signed(images: Tensor) -> Tensor:
    """Return uint8 images [B, H, W, 3] as float32 [B, 3, H, W] in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def reconstruction_loss(decoded: Tensor, images: Tensor) -> Tensor:
    """Return L1 + 4 MSE + 1/4 L1 of differences of neighbours, a scalar, for images [B, 3, H, W] in [-1, 1]."""
    error = decoded - images
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    return error.abs().mean() + 4 * error.square().mean() + 0.25 * edges


def draw_last_scales(batch: int, prefix: float, longest: int, scales: int, rng: torch.Generator) -> Tensor:
    """Draw the last decoded scale of each sample, int64 [B]: with probability `prefix` one of the first `longest`."""
    last = torch.randint(longest, (batch,), generator=rng)
    whole = torch.rand(batch, generator=rng) >= prefix
    return torch.where(whole, scales - 1, last)


def find_codes(vectors: Tensor, count: int, rng: torch.Generator, *, sphere: bool = False) -> Tensor:
    """Return `count` codes [count, channels] of vectors float32 [n, channels] by k-means.

    K-means++ chooses the first codes, so that rare vectors count. With `sphere`, vectors and codes have unit length.
    """
    vectors = vectors[torch.randperm(len(vectors), generator=rng)[:MAX_VECTORS]]
    codes = vectors[:1]
    nearest = _distances(vectors, codes)[:, 0]
    for _ in range(count - 1):
        chosen = vectors[torch.multinomial(nearest.clamp(min=1e-9), 1, generator=rng)]
        codes = torch.cat((codes, chosen))
        nearest = torch.minimum(nearest, _distances(vectors, chosen)[:, 0])
    for _ in range(ROUNDS):
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
def encode_images(encode: Encode, images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the latents, `dtype` [N, channels, h, w], of images uint8 [N, H, W, 3], both on the CPU."""
    latents = torch.empty(0)
    for first in range(0, len(images), ENCODED):
        with autocast(device):
            encoded = encode(to_signed(images[first : first + ENCODED].to(device)))
        if not first:  # one tensor for all images: small tensors between large blocks fragment memory
            latents = torch.empty(len(images), *encoded.shape[1:], dtype=dtype)
        latents[first : first + ENCODED] = encoded
    return latents
