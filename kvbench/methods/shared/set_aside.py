"""First tokens of a sequence set aside, for static methods that keep or drop whole segments."""

from dataclasses import replace

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.select import check_capacity


def set_aside(spec: ModelSpec, budget: Budget, sinks: int, leading: int) -> tuple[ModelSpec, Budget]:
    """Return shapes and budget without the first `leading` tokens, which every head holds to the end.

    A method shares the rest of the budget among the rest of the tokens, and itself keeps the first segments (`sinks`)
    to the end. The segments keep their indices; a segment whose tokens are all set aside has length 0.

    Raises:
        InfeasibleBudget: B is below the sinks and the first tokens.
        ValueError: `leading` is negative.
    """
    if not leading:
        return spec, budget
    check_capacity(spec, budget, sinks, leading=leading)
    leading = min(leading, spec.cached_length)
    segments = [
        segment._replace(
            start=max(segment.start - leading, 0),
            height=1,
            width=min(segment.length, max(segment.end - leading, 0)),
        )
        for segment in spec.segments
    ]
    rest, tokens = replace(spec, segments=tuple(segments)), leading * spec.all_heads
    return rest, replace(budget, capacity=budget.capacity - tokens, full=rest.full_tokens)
