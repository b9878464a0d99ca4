"""Decoder of Chameleon's image tokenizer (arXiv:2405.09818), a VQGAN of any image size."""

from dataclasses import dataclass

from torch import nn

from kvbench.models.parts.autoencoder import ConvDecoder
from kvbench.models.parts.codebook import VQGAN, Codebook, VQGANConfig


@dataclass(frozen=True)
class ChameleonConfig(VQGANConfig):
    """Shape of the tokenizer, with attention in the middle only."""

    attention = "middle"


class Chameleon(VQGAN):
    """Decoder of the tokenizer: tokens to images."""

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__()
        self.decoder = ConvDecoder(config.networks)
        self.quantize = Codebook(config)
        self.post_quant_conv = nn.Conv2d(config.channels, config.latents, 1)
