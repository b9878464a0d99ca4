"""The training loop of every network: resumable, deterministic in its step number, with a progress bar."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvbench.core import checkpoint
from kvbench.training.optim import Average, Optimizer, warm_hold_decay

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 100
"""Steps between checkpoints."""


@dataclass(frozen=True)
class Recipe:
    """Settings that the training of every network has, and its schedule.

    Attributes:
        inner: Muon trains the parameters of two or more dimensions whose name contains one of these; empty: any.
        outer: parts of names that Muon leaves to AdamW.
        muon: peak learning rate of Muon's parameters.
        adamw: peak learning rate of everything else.
        average: decay of the averaged weights.
        seed: seed of the weights and of every draw.
    """

    inner: ClassVar[tuple[str, ...]] = ("",)
    outer: ClassVar[tuple[str, ...]] = ()
    muon: float
    adamw: float
    average: float
    seed: int = 0

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        raise NotImplementedError

    @property
    def hold(self) -> float:
        """Share of the schedule at the peak rate."""
        return 0.4

    @property
    def decay(self) -> float:
        """Weight decay of Muon's parameters."""
        return 0.0

    def rate(self, step: int) -> float:
        """Return the learning-rate factor of a step."""
        return warm_hold_decay(step, step / self.steps, hold=self.hold)

    def is_hidden(self, name: str) -> bool:
        """Return whether Muon may train a parameter."""
        return any(part in name for part in self.inner) and not any(part in name for part in self.outer)


def fit(
    name: str,
    model: nn.Module,
    recipe: Recipe,
    loss: Callable[[int], Tensor],
    path: Path,
    rate: Callable[[int], float] | None = None,
) -> dict[str, Tensor]:
    """Train a network in place, from its last checkpoint if there is one, and return its averaged weights by name.

    Args:
        name: what the progress bar calls the network.
        model: freshly initialised, on the device to train on.
        recipe: learning rates, schedule and decay of the average; all its fields must agree with the checkpoint's.
        loss: gives the scalar loss of a step; it draws everything random from the step number, so that a resumed
            training repeats nothing.
        path: checkpoint file, read when it exists.
        rate: gives the factor of a step by which both learning rates are multiplied; None for the recipe's.

    Raises:
        ValueError: the checkpoint was made with another recipe.
        FloatingPointError: the loss is infinite or not a number.
    """
    optimizer = Optimizer(model, recipe.is_hidden, muon=recipe.muon, adamw=recipe.adamw, decay=recipe.decay)
    steps, rate = recipe.steps, rate or recipe.rate
    average = Average(model, recipe.average)
    settings = json.loads(json.dumps(asdict(recipe)))  # as the checkpoint gives them back: tuples as lists
    first = _resume(path, settings, model, optimizer, average)
    smooth = 0.0
    with tqdm(total=steps, initial=first, desc=name, mininterval=2.0) as bar:
        for step in range(first, steps):
            current = loss(step)
            value = float(current.detach())
            if not math.isfinite(value):
                raise FloatingPointError(f"{name}: the loss is {value} at step {step}")
            current.backward()  # type: ignore[no-untyped-call]
            optimizer.step(rate(step))
            average.update(step)
            smooth = value if step == first else 0.97 * smooth + 0.03 * value
            bar.update()
            bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
                tensors = _gather_tensors(model, optimizer, average)
                checkpoint.save(path, tensors, {"step": step + 1, "recipe": settings})
                log.info("%s: step %d of %d, loss %.4f", name, step + 1, steps, smooth)
    return average.tensors


def generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded by whole numbers (seed, purpose, step), so that any step is drawn on its own."""
    state = 0x9E3779B97F4A7C15
    for number in key:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
    return torch.Generator().manual_seed(state)


def _gather_tensors(model: nn.Module, optimizer: Optimizer, average: Average) -> dict[str, Tensor]:
    """Return all tensors that a training resumes from, by name."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"average/{name}": tensor for name, tensor in average.tensors.items()}
    return tensors | {f"optimizer/{name}": tensor for name, tensor in optimizer.state().items()}


def _resume(
    path: Path, settings: Mapping[str, object], model: nn.Module, optimizer: Optimizer, average: Average
) -> int:
    """Load a checkpoint that `fit` left, and return the number of steps it has behind it: 0 without a checkpoint."""
    if not path.is_file():
        return 0
    tensors, metadata = checkpoint.load(path)
    if metadata["recipe"] != settings:
        raise ValueError(f"{path} was made with another recipe: delete it, or set train.out to a new folder")
    model.load_state_dict(checkpoint.group(tensors, "model"))
    average.load(checkpoint.group(tensors, "average"))
    optimizer.load(checkpoint.group(tensors, "optimizer"))
    step = metadata["step"]
    assert isinstance(step, int)
    return step
