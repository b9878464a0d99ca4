"""The longest prompt of a run, where its method is prepared for this one and not for the longest of the model."""

from collections.abc import Sequence
from typing import NamedTuple

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.prompts.base import Prompt


class LongestPrompt(NamedTuple):
    """The text of the longest prompt and its number of tokens."""

    prompt: Prompt
    tokens: int


def find_longest(
    model: Model, method: Method, budget: Budget, prompts: Sequence[Prompt]
) -> LongestPrompt | None:
    """Return the longest prompt of a run if its method is prepared for it; None for the longest that the model reads.

    A method protects the tokens of a prompt, not the padding in front of it. So where padding does not count as held,
    a budget in tokens that is too small for the model's longest prompt may be large enough for the run's. A budget in
    bytes has one plan for prompts of all lengths (`Method.plan_for`).

    Raises:
        ValueError: a prompt cannot be encoded.
        WeightsError: the tokenizer is missing.
    """
    if budget.bytes is not None:
        return None
    try:
        method.check(model.spec, budget)
    except InfeasibleBudget:
        counts = model.count_prompt_tokens([prompt.text for prompt in prompts])
        return max(map(LongestPrompt, prompts, counts), key=lambda one: one.tokens, default=None)
    except ValueError:  # another fault, which a check of the job names
        pass
    return None
