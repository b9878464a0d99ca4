"""Qwen3's language model (arXiv:2505.09388): grouped heads, normalised queries and keys, rotation with base 10^6."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvbench.kernels.linear import linear
from kvbench.models.parts.decoder import Add, Decoder, DecoderConfig, add_nothing


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Shape of a language model; heads x head_dim may differ from the width.

    Attributes:
        tied: whether the embedding also maps the stream to logits.
    """

    qk_norm: Literal["none", "rms", "layer"] = "rms"
    eps: float = 1e-6
    rope_base: float = 1e6
    tied: bool = False


class Qwen3(Decoder):
    """The language model."""

    config: Qwen3Config

    def __init__(self, config: Qwen3Config, add: Add = add_nothing) -> None:
        super().__init__(config, add)
        if config.tied:
            del self.output

    def logits(self, x: Tensor) -> Tensor:
        """Map residual streams [..., width] to logits float32 [..., vocabulary]."""
        head = self.tok_embeddings if self.config.tied else self.output
        return linear(self.norm(x), head.weight, None).float()
