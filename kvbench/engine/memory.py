"""Memory of a KV cache in bytes, and in the unit that papers print."""

from kvbench.core.segments import ModelSpec

PAPER_BYTES = 6
"""Bytes per (token, channel) as the papers count: keys in fp32, values in 16 bits."""
MIB = 2**20
BIAS_CHANNELS = 8
"""Additional channels of keys, values and queries if slots have a bias (`engine/bias.py`)."""


def token_bytes(spec: ModelSpec, itemsize: int, *, biased: bool = False) -> int:
    """Return the bytes of one token's key and value in one head, with the channels of a bias.

    Args:
        spec: the model's shapes.
        itemsize: bytes of a stored value.
        biased: whether slots have a bias that is added to their scores (`Uses.bias`).
    """
    return 2 * (spec.head_dim + (BIAS_CHANNELS if biased else 0)) * itemsize


def cache_bytes(tokens: float, spec: ModelSpec, batch: int, itemsize: int) -> int:
    """Return the bytes of keys and values of `batch` prompts that hold `tokens` per sequence."""
    return round(tokens * spec.head_dim * 2 * itemsize * spec.branches * batch)


def paper_mib(tokens: float, spec: ModelSpec, batch: int) -> float:
    """Return MiB as HeatKV and ScaleKV print them (38550 for Infinity-2B, batch 8, full cache)."""
    return tokens * spec.head_dim * PAPER_BYTES * spec.branches * batch / MIB
