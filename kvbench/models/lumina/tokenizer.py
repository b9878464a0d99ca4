"""Chameleon's image tokenizer (arXiv:2405.09818), of which drawing needs the decoder: a VQGAN of any image size."""

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.llamagen.tokenizer import VQConfig
from kvbench.models.parts.autoencoder import Decoder, ImageTokenizer, NetworkConfig
from kvbench.models.parts.codebook import Codebook


@dataclass(frozen=True)
class ChameleonConfig(VQConfig):
    """Shape of a tokenizer."""

    @property
    def networks(self) -> NetworkConfig:
        """Shape of the decoder, with attention in the middle only."""
        return replace(super().networks, attention="middle")


class Chameleon(ImageTokenizer):
    """The tokenizer: tokens to images."""

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__()
        self.decoder = Decoder(config.networks)
        self.quantize = Codebook(config)
        self.post_quant_conv = nn.Conv2d(config.channels, config.latents, 1)

    def codes(self, tokens: Tensor) -> Tensor:
        """Look up the codes of tokens int64 [B, h, w] as they are: float32 [B, channels, h, w]."""
        return F.embedding(tokens, self.quantize.embedding.weight).permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, channels, h, w] to images [B, 3, h patch, w patch], not clamped."""
        return self.decoder(self.post_quant_conv(codes))
