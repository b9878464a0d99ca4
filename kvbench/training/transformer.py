"""Settings and steps that the trainings of all transformers share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kvbench.models.parts.decoder import Decoder
from kvbench.training.loop import Recipe, fit


@dataclass(frozen=True)
class BaseTransformerRecipe(Recipe):
    """Settings of a transformer's training; see `Recipe` for those that are not listed.

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
    """Train a transformer and what reads its prompts in place and return their averaged weights by name.

    Args:
        model: maps what `draw` gives to a scalar loss; freshly initialised, on the device to train on.
        draw: returns the arguments of a step; tensors may be on the CPU.
        recipe: settings.
        path: checkpoint file, read when it exists.
        rate: learning-rate factor of a step; None for the recipe's.
        compiled: use torch.compile, which needs a C++ compiler and is about 1.5 times faster on a CPU.

    Raises:
        ValueError, FloatingPointError: see `fit`.
    """
    forward = torch.compile(model, dynamic=False) if compiled else model
    device = next(model.parameters()).device

    def loss(step: int) -> Tensor:
        arguments = [one.to(device) if isinstance(one, Tensor) else one for one in draw(step)]
        with torch.autocast(device.type, torch.bfloat16):
            return forward(*arguments)

    return fit("transformer", model, recipe, loss, path, rate)


@torch.no_grad()
def init_decoder(decoder: Decoder, rng: torch.Generator) -> None:
    """Set the weights of a decoder to train from: unit-variance layers, zero residual branches and logits."""
    for name, parameter in decoder.named_parameters():
        if name.endswith(("wo.weight", "w2.weight")) or name == "output.weight":
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1)
        else:
            embeds = "embedding" in name
            parameter.normal_(0, 1.0 if embeds else parameter.shape[1] ** -0.5, generator=rng)
