"""Settings and steps of the trainings of all transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kvbench.extras.training.loop import Recipe, fit
from kvbench.extras.training.precision import autocast
from kvbench.models.parts.decoder import Decoder


@dataclass(frozen=True)
class BaseTransformerRecipe(Recipe):
    """Settings of a transformer's training; see `Recipe` for the others.

    Attributes:
        decay: weight decay of hidden matrices.
        hold: share of the schedule at the peak rate.
    """

    muon: float = 0.02
    adamw: float = 2e-3
    average: float = 0.995
    decay: float = 0.02
    hold: float = 0.4


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
    torch.compile, which needs a C++ compiler and is about 1.5 times faster on a CPU. For the others see `fit`.

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
