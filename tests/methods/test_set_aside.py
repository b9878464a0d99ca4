"""Shapes and budget without the first tokens, by hand."""

from fractions import Fraction

import pytest

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.shared.set_aside import set_aside

TEXT = ModelSpec("text", 2, 3, 8, next_token(5, [4, 4]), branches=1)
BUDGET = Budget(Fraction(43), TEXT.full_tokens, TEXT.all_heads)


@pytest.mark.parametrize(
    ("leading", "lengths"), [(0, (5, 4, 4)), (4, (1, 4, 4)), (5, (0, 4, 4)), (7, (0, 2, 4))]
)
def test_the_first_tokens_leave_shapes_and_budget(leading: int, lengths: tuple[int, ...]) -> None:
    spec, budget = set_aside(TEXT, BUDGET, 0, leading)
    assert spec.lengths == lengths
    assert spec.ends == tuple(max(end - leading, 0) for end in (5, 9, 13))
    assert budget.capacity == 43 - 6 * leading
    assert budget.full == spec.full_tokens == 6 * (9 - leading)


def test_scales_lose_their_first_tokens() -> None:
    scales = ModelSpec("image", 1, 1, 8, next_scale([(1, 1), (2, 2), (3, 3)]))
    spec, _ = set_aside(scales, Budget(Fraction(5), 5, 1), 0, 3)
    assert (spec.lengths, spec.cached_length) == ((0, 2, 9), 2)
