"""A compressed KV cache in one file: the embedded model, the full cache and H2O at a tenth of it, and their PSNR.

    python docs/examples/minimal.py

An image grows scale by scale, and a token attends to all tokens of its own and of earlier scales. Their keys and values
are the cache. After each scale a method decides, head by head, which of them later scales may still see. The model,
its weights and the prompts are kvbench's; the rows, the method and the measure are here. kvbench's engine draws the
same bytes from packed storage.

L layers, H heads of D channels, t tokens of the current scale. A row is one head of one sequence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.models.base import Model
from kvbench.models.noise import make_noise
from kvbench.scenes.grammar import evaluation_prompts

MODEL = "infinity_tiny"
BUDGET = 0.1
SEED = 0


@dataclass
class Row:
    """Tokens that one head of one sequence holds, in the order of their positions.

    Attributes:
        keys: [slots, D].
        values: [slots, D].
        position: int64 [slots].
        attention: [slots], attention that each token received from all queries since it was drawn.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    attention: Tensor

    @classmethod
    def make_empty(cls, channels: int) -> "Row":
        """Return a row without tokens."""
        pairs = torch.zeros(0, channels)
        return cls(pairs, pairs, torch.zeros(0, dtype=torch.int64), torch.zeros(0))

    def add(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Add the tokens of a scale, keys and values [t, D], whose first one has position `start`."""
        self.keys = torch.cat((self.keys, keys))
        self.values = torch.cat((self.values, values))
        self.position = torch.cat((self.position, torch.arange(start, start + len(keys))))
        self.attention = torch.cat((self.attention, torch.zeros(len(keys))))

    def attend(self, queries: Tensor, logit_scale: float) -> Tensor:
        """Return the output of queries [t, D], and add what each token receives to `attention`."""
        weights = (queries @ self.keys.T * logit_scale).softmax(-1)
        self.attention += weights.sum(0)
        return weights @ self.values

    def keep(self, slots: Tensor) -> None:
        """Keep the tokens of some slots, int64 [n] in increasing order, and drop all others."""
        self.keys, self.values = self.keys[slots], self.values[slots]
        self.position, self.attention = self.position[slots], self.attention[slots]


Method = Callable[[Row, Segment, int, int], Tensor]
"""(row, scale that just ran, capacity of the row, smallest capacity of its layer) -> slots that stay, increasing."""


@dataclass(frozen=True)
class H2O:
    """Heavy hitters: the latest tokens, and those that received most attention (arXiv:2306.14048).

    Attributes:
        sinks: first scales whose tokens never leave.
        recent: share of the smallest capacity in the layer that the latest tokens fill.
        spec: shapes of the model.
    """

    spec: ModelSpec
    sinks: int = 1
    recent: float = 0.5

    def __call__(self, row: Row, scale: Segment, capacity: int, smallest: int) -> Tensor:
        """Return the slots that stay after a scale; the earlier one of two equal slots stays."""
        if len(row.position) <= smallest:
            return torch.arange(len(row.position))
        latest = row.position >= scale.end - int(self.recent * smallest)
        sinks = row.position < self.spec.leading_tokens(self.sinks)
        scores = row.attention.masked_fill(latest | sinks, math.inf)
        return scores.sort(descending=True, stable=True).indices[:capacity].sort().values


def keep_all(row: Row, scale: Segment, capacity: int, smallest: int) -> Tensor:  # noqa: ARG001
    """Return all slots: the full cache."""
    return torch.arange(len(row.position))


class RowCache:
    """Cache of a model, which calls `reset` once, `begin` for each scale, and `attend` in each layer of the scale.

    Attributes:
        peak: most tokens that one sequence has held after any layer of any scale.
        budget: tokens that one sequence may hold, over all layers and heads.

    Args:
        spec: shapes of the model.
        method: decides what stays.
        share: budget, as a share of the full cache.
    """

    repetitions: Any = None  # nothing is recorded and replayed

    def __init__(self, spec: ModelSpec, method: Method, share: float) -> None:
        self.spec, self.method, self.peak = spec, method, 0
        self.budget = int(Fraction(str(share)) * spec.full_tokens)  # as written: 0.1 is a tenth
        even, more = divmod(self.budget, spec.all_heads)
        numbers = [even + (head < more) for head in range(spec.all_heads)]
        self.capacities = [
            numbers[start : start + spec.heads] for start in range(0, len(numbers), spec.heads)
        ]

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        """Start images: `sequences` are all prompts with guidance, then all of them without. Nothing is padded."""
        assert padding is None
        shape = range(sequences), range(self.spec.layers), range(self.spec.heads)
        self.rows = [
            [[Row.make_empty(self.spec.head_dim) for _ in shape[2]] for _ in shape[1]] for _ in shape[0]
        ]

    def begin(self, segment: Segment) -> None:
        """Begin a scale."""
        self.scale = segment

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend from q to the rows of a layer and to k, v, all [sequences, H, t, D]; then drop what the method drops.

        Raises:
            MemoryError: a sequence holds more tokens than the budget.
        """
        del raw_queries  # only methods that look at unrotated queries need them
        out, capacities = torch.empty_like(q), self.capacities[layer]
        for sequence, layers in enumerate(self.rows):
            for head, row in enumerate(layers[layer]):
                row.add(k[sequence, head], v[sequence, head], self.scale.start)
                out[sequence, head] = row.attend(q[sequence, head], self.spec.logit_scale)
                # No later scale sees the last one.
                slots = self.method(row, self.scale, capacities[head], min(capacities))
                row.keep(slots[row.position[slots] < self.spec.cached_length])
            held = sum(len(row.position) for rows in layers for row in rows)
            if held > self.budget:
                raise MemoryError(f"layer {layer}: {held} tokens are held, the budget is {self.budget}")
            self.peak = max(self.peak, held)
        return out

    def release(self) -> None:
        """Free all rows after the last scale."""
        self.rows = []

    def open_steps(self) -> None:
        """Return None: scales have no one-token steps."""


def load_model(name: str) -> Model:
    """Return an embedded model with its weights, built from its file in `conf/model`."""
    model: Model = instantiate(OmegaConf.load(str(files("kvbench.conf") / "model" / f"{name}.yaml")))
    model.load("cpu")
    return model


def draw(model: Model, prompts: Sequence[str], cache: RowCache) -> Tensor:
    """Return images uint8 [prompts, height, width, 3]; each prompt has its own noise, the same under every cache."""
    images = model.generate(prompts, cache, make_noise("stream", SEED, range(len(prompts)), "cpu"))
    assert isinstance(images, Tensor)
    return images


def measure_psnr(images: Tensor, reference: Tensor) -> list[float]:
    """Return the PSNR of each image in dB; infinite for equal images."""
    errors = (images.double() - reference.double()).square().flatten(1).mean(1).tolist()
    return [10 * math.log10(255**2 / error) if error else math.inf for error in errors]


def main(count: int = 4) -> tuple[Tensor, Tensor]:
    """Draw `count` prompts under both caches, print what is held and the PSNR, and return H2O's and the full images."""
    model = load_model(MODEL)
    prompts = [str(line["prompt"]) for line in evaluation_prompts(count)]
    full, small = RowCache(model.spec, keep_all, 1), RowCache(model.spec, H2O(model.spec), BUDGET)
    reference, images = draw(model, prompts, full), draw(model, prompts, small)
    print(f"{MODEL}, h2o: a sequence holds {small.peak} of {small.budget} tokens, all are {full.peak}")
    for prompt, decibels in zip(prompts, measure_psnr(images, reference), strict=True):
        print(f"{decibels:6.2f} dB  {prompt}")
    return images, reference


if __name__ == "__main__":
    main()
