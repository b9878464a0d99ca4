"""The training loop shared by every network: resumable, deterministic in its step number, with a progress bar."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvbench.training import checkpoint
from kvbench.training.optim import Average, Optimizer

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 100
"""Steps between checkpoints."""


@dataclass
class Fit:
    """One training run of one network.

    Attributes:
        name: shown in the progress bar.
        model: what is trained, in place.
        optimizer: its optimiser.
        average: the averaged weights, which are what is kept.
        loss: step -> scalar loss; draws everything random from the step number, so a resumed run repeats nothing.
        factor: step -> learning-rate factor.
        steps: how many.
        path: checkpoint file, read when it exists.
        recipe: settings that must agree with the checkpoint's.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    average: Average
    loss: Callable[[int], Tensor]
    factor: Callable[[int], float]
    steps: int
    path: Path
    recipe: dict[str, object]

    def run(self) -> None:
        """Trains to the end from the last checkpoint, or from the start.

        Raises:
            ValueError: the checkpoint was made with another recipe.
            FloatingPointError: the loss is not finite.
        """
        first = self._resume()
        smooth = 0.0
        with tqdm(total=self.steps, initial=first, desc=self.name, mininterval=2.0) as bar:
            for step in range(first, self.steps):
                loss = self.loss(step)
                loss.backward()  # type: ignore[no-untyped-call]
                value = float(loss.detach())
                if value != value:
                    raise FloatingPointError(f"{self.name}: loss is not a number at step {step}")
                self.optimizer.step(self.factor(step))
                self.average.update(step)
                smooth = value if step == first else 0.97 * smooth + 0.03 * value
                bar.update()
                bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
                if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == self.steps:
                    self._save(step + 1)
                    log.info("%s: step %d of %d, loss %.4f", self.name, step + 1, self.steps, smooth)

    def _save(self, step: int) -> None:
        tensors = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"average/{k}": v for k, v in self.average.tensors.items()}
        tensors |= {f"optimizer/{k}": v for k, v in self.optimizer.state().items()}
        checkpoint.save(self.path, tensors, {"step": step, "recipe": self.recipe})

    def _resume(self) -> int:
        if not self.path.is_file():
            return 0
        tensors, metadata = checkpoint.load(self.path)
        if metadata["recipe"] != self.recipe:
            raise ValueError(
                f"{self.path} was made with another recipe: delete it, or set train.out to a new folder"
            )
        self.model.load_state_dict(checkpoint.group(tensors, "model"))
        with torch.no_grad():
            for name, tensor in checkpoint.group(tensors, "average").items():
                self.average.tensors[name].copy_(tensor)
        self.optimizer.load(checkpoint.group(tensors, "optimizer"))
        step = metadata["step"]
        assert isinstance(step, int)
        return step


def generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by whole numbers (seed, stage, step), so that any step can be drawn on its own."""
    state = 0x9E3779B97F4A7C15
    for number in key:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
    return torch.Generator().manual_seed(state)
