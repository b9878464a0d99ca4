"""LlamaGen's image tokenizer: a VQGAN whose codes lie on the unit sphere (arXiv:2406.06525, section 3.1)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import Decoder, Encoder, ImageTokenizer, NetworkConfig
from kvbench.models.parts.codebook import Codebook, CodebookConfig, find_nearest


@dataclass(frozen=True, kw_only=True)
class VQConfig(CodebookConfig):
    """Shape of a tokenizer.

    Attributes:
        latents: channels between the networks and the 1x1 convolutions around the codes.
    """

    latents: int

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder."""
        return replace(super().networks, latents=self.latents)


class VQ(ImageTokenizer):
    """The tokenizer: images to tokens and back."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.patch = config.networks.patch
        self.encoder, self.decoder = Encoder(config.networks), Decoder(config.networks)
        self.quantize = Codebook(config)
        self.quant_conv = nn.Conv2d(config.latents, config.channels, 1)
        self.post_quant_conv = nn.Conv2d(config.channels, config.latents, 1)

    def latents(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] in [-1, 1] to latents [B, channels, H/patch, W/patch]."""
        return self.quant_conv(self.encoder(images))

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Return the codes nearest to latents [B, channels, h, w], both of unit length: tokens int64 [B, h, w]."""
        return find_nearest(F.normalize(latents.permute(0, 2, 3, 1), dim=-1), self._book)

    def codes(self, tokens: Tensor) -> Tensor:
        """Look up the codes of tokens int64 [B, h, w], of unit length: float32 [B, channels, h, w]."""
        return F.embedding(tokens, self._book).permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, channels, h, w] to images [B, 3, h patch, w patch], not clamped."""
        return self.decoder(self.post_quant_conv(codes))

    @property
    def _book(self) -> Tensor:
        return F.normalize(self.quantize.embedding.weight, dim=-1)
