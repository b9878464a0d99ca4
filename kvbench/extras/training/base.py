"""Base classes of the trainings of `task=train`, and their weight files."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvbench.core import checkpoint
from kvbench.core.config import ConfigError
from kvbench.core.devices import keep_freed_memory
from kvbench.extras.training.autoencoder import AutoencoderRecipe
from kvbench.extras.training.loop import Recipe, fit
from kvbench.extras.training.transformer import BaseTransformerRecipe, fit_transformer
from kvbench.models.base import Model
from kvbench.models.parts.autoencoder import Size

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Training(ABC):
    """Base class of trainings; a subclass has a recipe for every network, and `_train`.

    Attributes:
        kind: class of the models to train.
        out: folder of checkpoints, from which training resumes, and of the finished weights.
        transformer: recipe of the transformer.
        pool: number of generated images to train on.
        seed: seed of the images.
        device: training device; a CPU and a GPU give different weights, and so do processors with and without AVX512
            (`kvbench.extras.training.optim.choose_dtype`).
        threads: torch threads, on a CPU.
        compiled: use torch.compile (needs a C++ compiler).
    """

    kind: ClassVar[type[Model]]
    out: str
    transformer: BaseTransformerRecipe
    pool: int = 60_000
    seed: int = 0
    device: str = "cpu"
    threads: int = 2
    compiled: bool = True

    def train(self, model: Model) -> Path:
        """Train a model's networks and return the folder with the finished weights.

        Raises:
            ConfigError: the recipe is for another class of models.
            ValueError, FloatingPointError: see `kvbench.extras.training.loop.fit`.
        """
        if not isinstance(model, self.kind):
            raise ConfigError(
                f"train: the recipe is for a {self.kind.__name__}; use train={model.name} for model={model.name}"
            )
        torch.set_num_threads(self.threads)
        keep_freed_memory()
        out, started = Path(self.out).expanduser(), time.perf_counter()
        out.mkdir(parents=True, exist_ok=True)
        self._train(model, out)
        log.info("trained in %.0f s: %s", time.perf_counter() - started, out)
        return out

    @abstractmethod
    def _train(self, model: Any, out: Path) -> None:
        """Train the networks of a model of `kind` and write their weights."""

    def _fit_transformer(
        self,
        network: nn.Module,
        draw: Callable[[int], Sequence[object]],
        out: Path,
        rate: Callable[[int], float] | None = None,
    ) -> dict[str, Tensor]:
        """Train a transformer and its text encoder; arguments and result are those of `fit_transformer`."""
        path, network = out / "transformer.checkpoint.safetensors", network.to(self.device)
        return fit_transformer(network, draw, self.transformer, path, rate, compiled=self.compiled)


@dataclass(frozen=True, kw_only=True)
class ImageTraining(Training):
    """Base class of the trainings of a tokenizer and a transformer.

    Attributes:
        tokenizer: recipe of the tokenizer.
    """

    tokenizer: AutoencoderRecipe[Any]

    def _fit_tokenizer(self, network: nn.Module, images: Tensor, sizes: Sequence[Size], out: Path) -> None:
        """Train a tokenizer, load its averaged weights and write them; see `AutoencoderRecipe.make_loss`."""
        loss = self.tokenizer.make_loss(network.to(self.device), images, sizes, compiled=self.compiled)
        weights = fit("tokenizer", network, self.tokenizer, loss, out / "tokenizer.checkpoint.safetensors")
        network.load_state_dict(weights)
        write_weights(out / "tokenizer.safetensors", weights, self.tokenizer)


def write_weights(path: Path, weights: Mapping[str, Tensor], recipe: Recipe, part: str = "") -> None:
    """Write weights, or only those of the module's attribute `part`, as float16 safetensors with their recipe."""
    selected = checkpoint.group(weights, part, ".") if part else weights
    half = {name: tensor.cpu().half() for name, tensor in selected.items()}
    checkpoint.save(path, half, {"recipe": asdict(recipe)})
