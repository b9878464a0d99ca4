"""Stages of a training; next-scale models train coarse scales first, which determine the image and cost little."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.extras.training.optim import warm_hold_decay
from kvbench.extras.training.transformer import BaseTransformerRecipe


class Timed(Protocol):
    """Any stage of a training."""

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        ...


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True)
class Stage:
    """Stage on the first `scales` scales, with `steps` steps of `batch` samples."""

    scales: int
    batch: int
    steps: int


@dataclass(frozen=True)
class StagedRecipe(BaseTransformerRecipe):
    """Settings of a next-scale transformer's training; see `BaseTransformerRecipe` for the others.

    Attributes:
        stages: stages in order; the learning rate follows their cost.
    """

    inner: ClassVar[tuple[str, ...]] = ("block",)
    outer: ClassVar[tuple[str, ...]] = ("ada", "scale_mul")
    stages: tuple[Stage, ...] = ()

    @property
    def steps(self) -> int:
        """Optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def rate_by_cost(self, segments: Sequence[Segment], step: int) -> float:
        """Return the learning-rate factor of a step, which falls with the cost spent so far."""
        return warm_hold_decay(step, find_progress(self.stages, segments, step), hold=self.hold)


def find_stage(stages: Sequence[T], step: int) -> T:
    """Return the stage of a step, counted from 0.

    Raises:
        IndexError: the stages have fewer steps.
    """
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise IndexError(f"the stages end {step + 1} steps earlier")


def find_progress(stages: Sequence[Stage], segments: Sequence[Segment], step: int) -> float:
    """Return the share of the training's cost in tokens that is spent before a step."""
    spent, total, start = 0.0, 0.0, 0
    for stage in stages:
        cost = stage.batch * segments[stage.scales - 1].end
        spent += cost * min(max(step - start, 0), stage.steps)
        total += cost * stage.steps
        start += stage.steps
    return spent / total


def token_weights(segments: Sequence[Segment]) -> Tensor:
    """Return the weight of every token, float32 [sum t_k] with mean 1.

    Weights are proportional to t_k^-1/4 for scales of t_k tokens, so that large scales do not dominate.
    """
    weights = torch.cat([torch.full((s.length,), s.length**-0.25) for s in segments])
    return weights / weights.mean()
