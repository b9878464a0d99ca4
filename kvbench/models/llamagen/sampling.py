"""LlamaGen's sampling settings."""

from dataclasses import dataclass

from kvbench.models.parts.sampling import TokenSampling


@dataclass(frozen=True)
class LlamaGenSampling(TokenSampling):
    """Sampling of LlamaGen's scripts: division by the temperature, then truncation."""
