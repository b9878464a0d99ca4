"""Shapes: what a model of each family draws."""

import pytest

from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token


@pytest.mark.parametrize(
    ("segments", "family", "drawn"),
    [
        (next_scale([(1, 1), (2, 2), (3, 3)]), "next-scale", 14),
        (next_token(5, [8, 8, 7]), "next-token", 24),
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
