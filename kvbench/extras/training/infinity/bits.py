"""Inputs and targets of the transformer: bits of the residual pyramid with bitwise self-correction.

Shapes: B samples, d bits, latents [B, d, H, W], t_k tokens of scale k. `flip`, float32 [B] on the CPU, has each
sample's probability of a flipped bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import Size


def self_corrected_bits(
    latents: Tensor, sizes: Sequence[Size], amplitudes: Tensor, flip: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return targets bool [B, sum t_k, d] and inputs float32 [B, sum t_k - t_0, d] of scales from 1 on.

    The targets of a scale are the residual's signs. The codes in the running sum, of magnitude amplitude/sqrt(d), have
    flipped bits, so that later targets correct earlier mistakes (Infinity section 3.3). `sizes` is a prefix of the
    schedule.
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
    return torch.cat(targets, 1), torch.cat(inputs, 1) if inputs else latents.new_zeros(batch, 0, channels)


def straight_through_sums(
    latents: Tensor, sizes: Sequence[Size], amplitudes: Tensor, flip: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Quantise with gradients; return the sums after each scale [scales, B, d, H, W] and the commitment loss.

    A code is its sign in the forward pass and the residual in the backward pass, so that the encoder learns from any
    prefix of scales and the amplitudes learn from the forward value. The commitment loss is the mean squared distance
    of residuals to codes.
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
