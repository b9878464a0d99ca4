"""Stages of a training; of a next-scale one they are scales: the coarse ones decide the picture and cost little."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvbench.core.segments import Segment
from kvbench.training.optim import warm_hold_decay
from kvbench.training.transformer import BaseTransformerRecipe, fit_transformer


class Timed(Protocol):
    """A stretch of any training: it has a number of steps."""

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        ...


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True)
class Stage:
    """A stretch of training on the first `scales` scales: `steps` steps of `batch` samples."""

    scales: int
    batch: int
    steps: int


@dataclass(frozen=True)
class StagedRecipe(BaseTransformerRecipe):
    """Settings that every next-scale transformer's training has; see `BaseTransformerRecipe` for the others.

    Attributes:
        stages: scale prefixes in order; the schedule is weighted by their cost.
    """

    stages: tuple[Stage, ...] = ()


def fit_stages(
    model: nn.Module,
    draw: Callable[[int], tuple[tuple[Tensor, ...], object]],
    segments: Sequence[Segment],
    recipe: StagedRecipe,
    path: Path,
    device: torch.device,
    *,
    compiled: bool,
) -> dict[str, Tensor]:
    """Train a transformer and what reads its prompts in place and return their averaged weights by name.

    Args:
        model: maps what `draw` gives to a scalar loss; on the device to train on.
        draw: returns the tensors of a step, on the CPU, and which scales they are of.
        segments: the whole schedule.
        recipe: settings.
        path: checkpoint file, read when it exists.
        device: where to train.
        compiled: see `fit_transformer`.

    Raises:
        ValueError, FloatingPointError: see `fit`.
    """

    def flatten(step: int) -> tuple[object, ...]:
        tensors, scales = draw(step)
        return (*tensors, scales)

    return fit_transformer(
        model,
        flatten,
        recipe,
        path,
        device,
        steps=count_steps(recipe.stages),
        rate=partial(find_rate, recipe.stages, segments, recipe.hold),
        hidden=lambda name: "block" in name and "ada" not in name and "scale_mul" not in name,
        compiled=compiled,
    )


def count_steps(stages: Sequence[Timed]) -> int:
    """Return the optimiser steps of all stages."""
    return sum(stage.steps for stage in stages)


def find_stage(stages: Sequence[T], step: int) -> T:
    """Return the stage that a step belongs to, counted from 0.

    Raises:
        IndexError: the stages have fewer steps.
    """
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise IndexError(f"the stages end {step + 1} steps earlier")


def find_progress(stages: Sequence[Stage], segments: Sequence[Segment], step: int) -> float:
    """Return the share of the training's whole cost, counted in tokens, that is spent before a step."""
    spent, total, start = 0.0, 0.0, 0
    for stage in stages:
        cost = stage.batch * segments[stage.scales - 1].end
        spent += cost * min(max(step - start, 0), stage.steps)
        total += cost * stage.steps
        start += stage.steps
    return spent / total


def find_rate(stages: Sequence[Stage], segments: Sequence[Segment], hold: float, step: int) -> float:
    """Return the learning-rate factor of a step, which falls with the cost that is spent (`warm_hold_decay`)."""
    return warm_hold_decay(step, find_progress(stages, segments, step), hold=hold)


def token_weights(segments: Sequence[Segment]) -> Tensor:
    """Return the weight of every token, float32 [sum t_k] with mean 1.

    A token of a scale of t_k tokens weighs in proportion to t_k^-1/4, so that large scales do not drown the small ones.
    """
    weights = torch.cat([torch.full((s.length,), s.length**-0.25) for s in segments])
    return weights / weights.mean()
