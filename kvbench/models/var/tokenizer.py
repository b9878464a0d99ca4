"""VAR's multi-scale VQ-VAE (arXiv:2404.02905, section 3.2, algorithms 1 and 2).

It has an encoder, a residual vector quantiser for any schedule of scales, and a decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import ConvDecoder, ConvEncoder, ImageTokenizer, Size, resize
from kvbench.models.parts.codebook import Codebook, CodebookConfig, find_nearest

TICKS = (0.08333333333333333, 0.36111111111111105, 0.6388888888888888, 0.9166666666666666)
"""Positions of the four convolutions between the first scale (0) and the last (1), exact in float64.

Some scales of published schedules are halfway between two of these; rounding decides which one is nearer.
"""
CONVOLUTION_SHARE = 0.5
"""Weight of the convolution's output in a scale's codes; the rest is its input."""


@dataclass(frozen=True)
class VQConfig(CodebookConfig):
    """Shape of a tokenizer whose latents have the channels of a code."""


class _Quantizer(Codebook):
    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        convolutions = [nn.Conv2d(config.channels, config.channels, 3, padding=1) for _ in TICKS]
        self.quant_resi = nn.ModuleDict({"qresi_ls": nn.ModuleList(convolutions)})


class VQVAE(ImageTokenizer):
    """Image tokenizer: images to tokens per scale and back."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = ConvEncoder(config.networks), ConvDecoder(config.networks)
        self.quantize = _Quantizer(config)
        self.quant_conv = nn.Conv2d(config.channels, config.channels, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(config.channels, config.channels, 3, padding=1)

    def latents(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] in [-1, 1] to latents [B, channels, H/patch, W/patch]."""
        return self.quant_conv(self.encoder(images))

    def codes(self, tokens: Tensor) -> Tensor:
        """Look up the codes float32 [..., channels] of tokens int64 [...]."""
        return self.quantize.embedding(tokens)

    def add(self, summed: Tensor, codes: Tensor, scale: int, scales: int) -> Tensor:
        """Add the codes [B, h, w, channels] of a scale of `scales` to the running sum [B, channels, H, W].

        A bicubic resize is followed by the convolution of the scale (`choose_convolution`).
        """
        grid = (summed.shape[2], summed.shape[3])
        resized = resize(codes.permute(0, 3, 1, 2), grid, "bicubic")
        convolution = self.quantize.quant_resi.get_submodule(f"qresi_ls.{choose_convolution(scale, scales)}")
        return summed + (1 - CONVOLUTION_SHARE) * resized + CONVOLUTION_SHARE * convolution(resized)

    @torch.no_grad()
    def encode(self, latents: Tensor, sizes: Sequence[Size]) -> tuple[list[Tensor], Tensor]:
        """Quantise the residuals of latents float32 [B, channels, H, W] to the nearest codes, scale by scale.

        Return each scale's tokens, int64 [B, h, w], and the sum of all codes, float32 [B, channels, H, W].

        Raises:
            ValueError: the last of `sizes` (h, w) is not the latents' size.
        """
        if tuple(sizes[-1]) != tuple(latents.shape[2:]):
            raise ValueError(
                f"the last scale is {tuple(sizes[-1])}, the latents are {tuple(latents.shape[2:])}"
            )
        summed = torch.zeros_like(latents)
        tokens: list[Tensor] = []
        for scale, size in enumerate(sizes):
            tokens.append(self.nearest(shrink(latents - summed, size)))
            summed = self.add(summed, self.codes(tokens[-1]), scale, len(sizes))
        return tokens, summed

    @torch.no_grad()
    def nearest(self, residual: Tensor) -> Tensor:
        """Return the tokens int64 [B, h, w] whose codes are nearest to residuals [B, channels, h, w]."""
        return find_nearest(residual.permute(0, 2, 3, 1), self.quantize.embedding.weight)

    def decode(self, summed: Tensor) -> Tensor:
        """Decode any prefix sum of codes [B, channels, H, W] to an image [B, 3, .., ..] clamped to [-1, 1]."""
        latents = self.post_quant_conv(summed.to(self.post_quant_conv.weight.dtype))
        return self.decoder(latents).clamp(-1, 1)


def choose_convolution(scale: int, scales: int) -> int:
    """Return the index of a scale's convolution, that of the nearest tick, the earlier tick on ties."""
    position = scale / (scales - 1)
    return min(range(len(TICKS)), key=lambda j: abs(TICKS[j] - position))


def shrink(x: Tensor, size: Size) -> Tensor:
    """Average x [B, channels, H, W] over the cells of a smaller grid, which overlap if the sizes do not divide."""
    return F.adaptive_avg_pool2d(x, size)
