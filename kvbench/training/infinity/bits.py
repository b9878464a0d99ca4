"""Inputs and targets of the transformer: bits of the residual pyramid under bitwise self-correction."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import Size


def self_corrected_bits(
    latents: Tensor, sizes: Sequence[Size], amplitudes: Tensor, flip: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return targets and inputs of one training pass (Infinity section 3.3, bitwise self-correction).

    At each scale the residual's signs are the targets; the code that enters the running sum has each bit flipped with
    the sample's probability, so that later targets correct earlier mistakes.

    Args:
        latents: float32 [B, d, H, W], encoder output.
        sizes: (h, w) of the scales to use, a prefix of the schedule.
        amplitudes: float32 [scales], factor of each scale's codes of magnitude 1/sqrt(d).
        flip: float32 [B], probability that a bit of the sample is flipped.
        rng: source of the flips.

    Returns:
        Targets bool [B, sum t_k, d] and inputs float32 [B, sum t_k - t_0, d] (the inputs of scales 1 and on).
    """
    batch, channels, height, width = latents.shape
    summed = torch.zeros_like(latents)
    targets: list[Tensor] = []
    inputs: list[Tensor] = []
    for scale, size in enumerate(sizes):
        if scale:
            resized = F.interpolate(summed, size, mode="bilinear", align_corners=False)
            inputs.append(resized.flatten(2).transpose(1, 2))
        residual = latents - summed
        bits = F.interpolate(residual, size, mode="area") > 0
        targets.append(bits.flatten(2).transpose(1, 2))
        flipped = bits ^ (torch.rand(bits.shape, generator=rng) < flip[:, None, None, None])
        codes = (flipped.float() * 2 - 1) * (amplitudes[scale] / channels**0.5)
        summed = summed + F.interpolate(codes, (height, width), mode="bilinear", align_corners=False)
    empty = latents.new_zeros(batch, 0, channels)
    return torch.cat(targets, 1), torch.cat(inputs, 1) if inputs else empty


def straight_through_sums(
    latents: Tensor, sizes: Sequence[Size], amplitudes: Tensor, flip: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Quantise with gradients and return the decoder's input after every scale, and the commitment loss.

    A code is its sign forward and the residual itself backward, so the encoder learns from the decoding of any prefix
    of scales; amplitudes learn through the forward value.

    Args:
        latents: float [B, d, H, W], encoder output.
        sizes: (h, w) of every scale.
        amplitudes: float [scales], learned.
        flip: float32 [B] on the CPU, probability that a bit of the sample is flipped.
        rng: source of the flips, on the CPU.

    Returns:
        Sums after each scale [scales, B, d, H, W] and the mean squared distance of residuals to their codes.
    """
    channels, grid = latents.shape[1], latents.shape[2:]
    summed = torch.zeros_like(latents)
    sums: list[Tensor] = []
    commitment = latents.new_zeros(())
    for scale, size in enumerate(sizes):
        residual = F.interpolate(latents - summed, size, mode="area")
        flips = (torch.rand(residual.shape, generator=rng) < flip[:, None, None, None]).to(residual.device)
        signs = torch.where((residual > 0) ^ flips, 1.0, -1.0)
        codes = signs * (amplitudes[scale] / channels**0.5)
        commitment = commitment + (residual - codes.detach()).square().mean()
        codes = codes + residual - residual.detach()
        summed = summed + F.interpolate(codes, grid, mode="bilinear", align_corners=False)
        sums.append(summed)
    return torch.stack(sums), commitment / len(sizes)
