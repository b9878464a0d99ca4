"""Shape of Qwen3's language model (arXiv:2505.09388): normalised queries and keys, rotation with base 10^6."""

from dataclasses import dataclass
from typing import Literal

from kvbench.models.parts.text_decoder import TextDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(TextDecoderConfig):
    """Shape of the language model, with Qwen3's defaults."""

    qk_norm: Literal["none", "rms", "layer"] = "rms"
    eps: float = 1e-6
    rope_base: float = 1e6
