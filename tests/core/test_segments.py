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


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_shapes_of_another_prompt_are_those_drawn_after_it(tokens: int) -> None:
    spec = ModelSpec("some", 1, 1, 8, next_token(5, [8, 8, 7]))
    assert spec.with_prompt(tokens).segments == next_token(tokens, [8, 8, 7])
