"""Shapes: what a model of each family draws."""

import pytest

from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.models.llamagen.transformer import LlamaGenConfig

LLAMAGEN_XL = LlamaGenConfig(
    depth=36, width=1280, heads=20, kv_heads=20, head_dim=64, hidden=3584, vocabulary=16384, grid=(24, 24)
)


@pytest.mark.parametrize(
    ("segments", "family", "drawn"),
    [
        (next_scale([(1, 1), (2, 2), (3, 3)]), "next-scale", 14),
        (next_token(5, [8, 8, 7]), "next-token", 24),
        (LLAMAGEN_XL.segments(1), "next-token", 576),
        (LLAMAGEN_XL.segments(1, 100), "next-token", 576),
    ],
)
def test_what_is_drawn(segments: tuple[Segment, ...], family: str, drawn: int) -> None:
    spec = ModelSpec("some", 1, 1, 8, segments)
    assert spec.family == family
    assert spec.drawn_tokens == drawn
