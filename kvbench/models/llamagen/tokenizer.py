"""LlamaGen's image tokenizer: a VQGAN whose codes have unit length (arXiv:2406.06525, section 3.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import ConvDecoder, ConvEncoder
from kvbench.models.parts.codebook import VQGAN, Codebook, VQGANConfig, find_nearest


@dataclass(frozen=True, kw_only=True)
class VQConfig(VQGANConfig):
    """Shape of LlamaGen's tokenizer."""


class VQ(VQGAN):
    """Image tokenizer: images to tokens and back."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        self.patch = config.networks.patch
        self.encoder, self.decoder = ConvEncoder(config.networks), ConvDecoder(config.networks)
        self.quantize = Codebook(config)
        self.quant_conv = nn.Conv2d(config.latents, config.channels, 1)
        self.post_quant_conv = nn.Conv2d(config.channels, config.latents, 1)

    def latents(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] in [-1, 1] to latents [B, channels, H/patch, W/patch]."""
        return self.quant_conv(self.encoder(images))

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Return the tokens int64 [B, h, w] of the codes nearest to normalised latents [B, channels, h, w]."""
        return find_nearest(F.normalize(latents.permute(0, 2, 3, 1), dim=-1), self._book)

    @property
    def _book(self) -> Tensor:
        return F.normalize(self.quantize.embedding.weight, dim=-1)
