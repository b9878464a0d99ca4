"""Plans of a method for prompts that are shorter than the longest prompt."""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Self

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.view import View

MAX_PLANS = 64
"""Maximum number of plans, each for a length of prompts, that a method holds between batches."""


class Planned:
    """Method that is prepared for the longest prompt, and once more for each length of shorter prompts.

    What is kept of a shorter text must not depend on the padding in front of its prompt.

    Attributes:
        spec: the model's shapes, set by `prepare`.
        budget: the budget B, set by `prepare`.
    """

    spec: ModelSpec
    budget: Budget
    _title: str | None = None
    _longest: ModelSpec | None = None  # spec of the longest prompt, in a plan for a shorter prompt
    _artifact: Artifact | None
    _plans: dict[int, Self]  # plans by tokens of the prompt, made since `prepare`

    @property
    def title(self) -> str:
        """Name for messages: the one in `conf/method` once it is set, else the class's."""
        return self._title or type(self).__name__

    @title.setter
    def title(self, name: str) -> None:
        self._title = name

    @property
    def calibrated_spec(self) -> ModelSpec:
        """Shapes for which calibrations are made: of the longest prompt that the model reads."""
        return self._longest or self.spec

    @calibrated_spec.setter
    def calibrated_spec(self, spec: ModelSpec) -> None:
        self._longest = spec

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Plan for the longest prompt of a model or of a run (`Method.prepare`)."""
        self.spec, self.budget = spec, budget
        self._artifact, self._plans = artifact, {}

    def plan_for(self, tokens: int) -> Self:
        """Return the method prepared for prompts of `tokens` tokens, with the same budget in tokens.

        A budget in bytes has one plan, since only its bytes are known to fit.
        """
        if tokens == self.spec.segments[0].length or self.budget.bytes is not None:
            return self
        if tokens not in self._plans:
            spec = self.spec.with_prompt(tokens)
            plan = self._renew()
            plan.title, plan.calibrated_spec = self.title, self.calibrated_spec
            plan.prepare(spec, replace(self.budget, full=spec.full_tokens), self._artifact)
            self.adopt_plan(tokens, plan)
        return self._plans[tokens]

    def _renew(self) -> Self:
        """Return a method of the same settings that is not prepared."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.init}  # type: ignore[arg-type]
        return type(self)(
            **{
                name: value._renew() if isinstance(value, Planned) else value
                for name, value in settings.items()
            }
        )

    def list_plans(self, view: View) -> list[Self]:
        """Return `plan_for` the prompt of each sequence; only this method if all prompts are equally long.

        Padding that counts as held is a part of the prompt.
        """
        lengths = () if self.spec.padding_counts else view.prompt_lengths
        return [self.plan_for(tokens) for tokens in lengths] or [self]

    def adopt_plan(self, tokens: int, plan: Self) -> None:
        """Make `plan` the result of `plan_for`."""
        self._plans[tokens] = plan

    def forget_plans(self, besides: Collection[int]) -> None:
        """Drop the plans for other lengths of prompts if there are more than `MAX_PLANS`; called between batches."""
        if len(self._plans) > MAX_PLANS:
            self._plans = {tokens: plan for tokens, plan in self._plans.items() if tokens in besides}
