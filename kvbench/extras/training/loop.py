"""Resumable training loop of all networks, whose randomness depends on the step alone."""

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
from kvbench.extras.training.optim import Optimizer, update_average, warm_hold_decay

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 100
"""Number of steps between two checkpoints."""


@dataclass(frozen=True)
class Recipe:
    """Settings and schedule of the training of any network.

    Attributes:
        inner: Muon trains parameters of two or more dimensions whose name contains one of these; "" matches all.
        outer: parts of the names of parameters that AdamW trains instead.
        muon: peak learning rate of Muon.
        adamw: peak learning rate of AdamW.
        average: decay of the averaged weights per step.
        seed: seed of the weights and of all samples.
    """

    inner: ClassVar[tuple[str, ...]] = ("",)
    outer: ClassVar[tuple[str, ...]] = ()
    muon: float
    adamw: float
    average: float
    seed: int = 0

    @property
    def steps(self) -> int:
        """Number of steps of the optimiser."""
        raise NotImplementedError

    @property
    def hold(self) -> float:
        """Share of the schedule in which the learning rate stays at its peak."""
        return 0.4

    @property
    def decay(self) -> float:
        """Weight decay of the parameters that Muon trains."""
        return 0.0

    def rate(self, step: int) -> float:
        """Return the learning-rate factor of a step."""
        return warm_hold_decay(step, step / self.steps, self.hold)

    def is_hidden(self, name: str) -> bool:
        """Return whether Muon may train a parameter by its name."""
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
        name: label of the progress bar.
        model: newly initialised, on the device to train on.
        recipe: learning rates, schedule and decay of the average; must equal the checkpoint's.
        loss: function from a step to its scalar loss; all its randomness depends on the step alone, so that a resumed
            training continues exactly.
        path: checkpoint file, read if it exists.
        rate: function from a step to its learning-rate factor; None for `recipe.rate`.

    Raises:
        ValueError: the checkpoint's recipe differs.
        FloatingPointError: the loss is not finite.
    """
    optimizer = Optimizer(model, recipe.is_hidden, muon=recipe.muon, adamw=recipe.adamw, decay=recipe.decay)
    steps, rate = recipe.steps, rate or recipe.rate
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = json.loads(json.dumps(asdict(recipe)))  # JSON turns tuples into lists, as in the checkpoint
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
            update_average(average, model, recipe.average, step)
            smooth = value if step == first else 0.97 * smooth + 0.03 * value
            bar.update()
            bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
                tensors = _gather_tensors(model, optimizer, average)
                checkpoint.save(path, tensors, {"step": step + 1, "recipe": settings})
                log.info("%s: step %d of %d, loss %.4f", name, step + 1, steps, smooth)
    return average


def generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded by integers (seed, purpose, step), so that steps are independent."""
    state = 0x9E3779B97F4A7C15
    for number in key:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
    return torch.Generator().manual_seed(state)


def _gather_tensors(
    model: nn.Module, optimizer: Optimizer, average: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"average/{name}": tensor for name, tensor in average.items()}
    return tensors | {f"optimizer/{name}": tensor for name, tensor in optimizer.state().items()}


def _resume(
    path: Path,
    settings: Mapping[str, object],
    model: nn.Module,
    optimizer: Optimizer,
    average: Mapping[str, Tensor],
) -> int:
    """Load a checkpoint and return its finished steps, 0 if it is missing; raise ValueError if recipes differ."""
    if not path.is_file():
        return 0
    tensors, metadata = checkpoint.load(path)
    if metadata["recipe"] != settings:
        raise ValueError(f"{path} has a different recipe: delete it, or set train.out to a new folder")
    model.load_state_dict(checkpoint.group(tensors, "model"))
    for name, tensor in checkpoint.group(tensors, "average").items():
        average[name].copy_(tensor)
    optimizer.load(checkpoint.group(tensors, "optimizer"))
    step = metadata["step"]
    assert isinstance(step, int)
    return step
