"""Infinity's multi-scale bitwise tokenizer (BSQ-VAE, arXiv:2412.04431, section 3.2).

It has an encoder, a residual sign quantiser and a decoder.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.base import require_sizes
from kvbench.models.parts.autoencoder import (
    ConvDecoder,
    ConvEncoder,
    ImageTokenizer,
    NetworkConfig,
    NetworkShape,
    Size,
    resize,
)


@dataclass(frozen=True, kw_only=True)
class BSQConfig(NetworkShape):
    """Shape of a tokenizer; official files have `stem` 1 and no `mixers`.

    Attributes:
        bits: channels d of the latent; each is one bit per scale.
        scales: scales with learned code amplitudes; 0 for the official fixed amplitude 1.
    """

    bits: int
    scales: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("model.tokenizer", self, *(("bits", "scales") if self.scales else ("bits",)))

    @property
    def networks(self) -> NetworkConfig:
        """Shapes of the encoder and the decoder."""
        shape = {field.name: getattr(self, field.name) for field in fields(NetworkShape)}
        return NetworkConfig(latents=self.bits, **shape)


class BSQ(ImageTokenizer):
    """Image tokenizer: images to bits per scale and back."""

    def __init__(self, config: BSQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = ConvEncoder(config.networks), ConvDecoder(config.networks)
        if config.scales:
            self.amplitudes = nn.Parameter(
                torch.tensor([1.8 * 0.84**scale for scale in range(config.scales)])
            )

    def codes(self, bits: Tensor, scale: int) -> Tensor:
        """Return codes of magnitude amplitude/sqrt(d) for a scale's bits (bool or int), float32 of the same shape."""
        amplitude = self.amplitudes[scale].float() if self.config.scales else 1.0
        return (bits.float() * 2 - 1) * (amplitude / self.config.bits**0.5)

    def add(self, summed: Tensor, bits: Tensor, scale: int) -> Tensor:
        """Add the codes of a scale's bits [B, h, w, d], resized bilinearly, to the running sum [B, d, H, W]."""
        codes = self.codes(bits, scale).permute(0, 3, 1, 2)
        return summed + resize(codes, (summed.shape[2], summed.shape[3]))

    @torch.no_grad()
    def quantize(self, latents: Tensor, sizes: list[Size]) -> tuple[list[Tensor], Tensor]:
        """Quantise latents [B, d, H, W] to the signs of their residuals, scale by scale.

        Return each scale's bits, bool [B, h, w, d], and the sum of all codes, float32 [B, d, H, W].
        """
        summed = torch.zeros_like(latents, dtype=torch.float32)
        bits: list[Tensor] = []
        for scale, size in enumerate(sizes):
            residual = F.interpolate(latents - summed, size, mode="area")
            bits.append((residual > 0).permute(0, 2, 3, 1))
            summed = self.add(summed, bits[-1], scale)
        return bits, summed

    def decode(self, summed: Tensor) -> Tensor:
        """Decode any prefix sum of codes [B, d, H, W] to an image [B, 3, .., ..] clamped to [-1, 1]."""
        return self.decoder(summed).clamp(-1, 1)
