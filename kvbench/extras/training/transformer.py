"""Trainings of all transformers: settings, stages, causal attention and steps.

Next-scale models train coarse scales first, which determine the image and cost little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvbench.core.segments import Segment
from kvbench.extras.training.loop import Recipe, fit
from kvbench.extras.training.optim import autocast, warm_hold_decay
from kvbench.models.parts.decoder import Decoder

QUERY_BLOCK = 68
"""Number of queries in a block of `attend_causally`."""


@dataclass(frozen=True)
class BaseTransformerRecipe(Recipe):
    """Settings of a transformer's training; see `Recipe` for the other settings.

    Attributes:
        decay: weight decay of hidden matrices.
        hold: share of the schedule at the peak learning rate.
    """

    muon: float = 0.02
    adamw: float = 2e-3
    average: float = 0.995
    decay: float = 0.02
    hold: float = 0.4


class Timed(Protocol):
    """A stage of a training with a number of steps."""

    @property
    def steps(self) -> int:
        """Number of steps of the optimiser."""


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True)
class StagedRecipe(BaseTransformerRecipe, Generic[T]):
    """Settings of a training in stages; see `BaseTransformerRecipe` for the other settings.

    Attributes:
        stages: stages in order.
    """

    stages: tuple[T, ...] = ()

    @property
    def steps(self) -> int:
        """Number of optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def find_stage(self, step: int) -> T:
        """Return the stage of a step, counted from 0; raise IndexError if the stages have fewer steps."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError(f"the stages end {step + 1} steps earlier")


@dataclass(frozen=True)
class Stage:
    """Stage on the first `scales` scales, with `steps` steps of `batch` samples."""

    scales: int
    batch: int
    steps: int


@dataclass(frozen=True)
class NextScaleRecipe(StagedRecipe[Stage]):
    """Settings of a next-scale transformer's training; the learning rate follows the cost of the stages."""

    inner: ClassVar[tuple[str, ...]] = ("block",)
    outer: ClassVar[tuple[str, ...]] = ("ada", "scale_mul")

    def rate_by_cost(self, segments: Sequence[Segment], step: int) -> float:
        """Return the learning-rate factor of a step, which falls with the cost in tokens spent before it."""
        spent, total, start = 0.0, 0.0, 0
        for stage in self.stages:
            cost = stage.batch * segments[stage.scales - 1].end
            spent += cost * min(max(step - start, 0), stage.steps)
            total += cost * stage.steps
            start += stage.steps
        return warm_hold_decay(step, spent / total, self.hold)


def fit_transformer(
    model: nn.Module,
    draw: Callable[[int], Sequence[object]],
    recipe: BaseTransformerRecipe,
    path: Path,
    rate: Callable[[int], float] | None = None,
    *,
    compiled: bool,
) -> dict[str, Tensor]:
    """Train a transformer and its text encoder in place and return their averaged weights by name.

    `model` maps the arguments of a step, which `draw` returns on any device, to a scalar loss. `compiled` uses
    torch.compile, which needs a C++ compiler and is about 1.5 times faster on a CPU. See `fit` for the other arguments.

    Raises:
        ValueError, FloatingPointError: see `fit`.
    """
    forward = torch.compile(model, dynamic=False) if compiled else model
    device = next(model.parameters()).device

    def loss(step: int) -> Tensor:
        arguments = [value.to(device) if isinstance(value, Tensor) else value for value in draw(step)]
        with autocast(device):
            return forward(*arguments)

    return fit("transformer", model, recipe, loss, path, rate)


@torch.no_grad()
def init_decoder(decoder: Decoder, rng: torch.Generator) -> None:
    """Initialise a decoder for training: unit-variance layers, zero residual branches and logits."""
    for name, parameter in decoder.named_parameters():
        if name.endswith(("wo.weight", "w2.weight")) or name == "output.weight":
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1)
        else:
            embeds = "embedding" in name
            parameter.normal_(0, 1.0 if embeds else parameter.shape[1] ** -0.5, generator=rng)


def token_weights(segments: Sequence[Segment]) -> Tensor:
    """Return the weight of every token, float32 [sum t_k] with mean 1.

    Weights are proportional to t_k^(-1/4) for scales of t_k tokens, so that large scales do not dominate.
    """
    weights = torch.cat([torch.full((s.length,), s.length**-0.25) for s in segments])
    return weights / weights.mean()


def attend_causally(_layer: int, q: Tensor, k: Tensor, v: Tensor, _plain: object) -> Tensor:
    """Attend causally in blocks of queries, so that most masked scores are never computed.

    The gradient of torch's fused attention is several times slower on a CPU. The arguments are those of
    `kvbench.models.parts.layers.Attend`: q [B, heads, tokens, D], k and v [B, KV heads, tokens, D], with heads a
    multiple of KV heads. The result has the shape of q.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    outputs = []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        queries = q[:, :, start : start + QUERY_BLOCK]
        end = start + queries.shape[2]
        later = torch.ones(queries.shape[2], end, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = (queries @ k[:, :, :end].transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs.append(weights.to(v.dtype) @ v[:, :, :end])
    return torch.cat(outputs, 2)
