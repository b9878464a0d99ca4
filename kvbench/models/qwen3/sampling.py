"""Qwen3's sampling settings."""

from dataclasses import dataclass

from kvbench.models.parts import text_sampling


@dataclass(frozen=True)
class TextSampling(text_sampling.TextSampling):
    """Sampling of tokens; the defaults are Qwen3's for thinking."""

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95
