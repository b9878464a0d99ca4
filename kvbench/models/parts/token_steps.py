"""Steps of a next-token model: each computes logits from the previous token and samples the next one.

A step launches hundreds of small GPU kernels, and launching them can take longer than running them. All that a step
reads and writes therefore has a fixed address on the device, so that one recording repeats it (`Cache.open_steps`).

Shapes: B prompts, N tokens sampled per prompt, D channels of a head.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from kvbench.core.devices import send
from kvbench.engine.recording.graphs import Repeat
from kvbench.engine.recording.repetitions import Repetitions, list_tensors
from kvbench.models.noise import CounterNoise, Noise


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens sampled so far.

    Attributes:
        rotation: complex64 [N, D/2]; row n rotates token n - 1, whose step samples token n.
        tokens: int64 [B, N].
        sums: float32 [B, N], sums of the logits of each token; finite only if all logits are.
        last: int64 [B], the token sampled last.
        count: int64 [1], tokens sampled per prompt.
    """

    rotation: Tensor
    tokens: Tensor
    sums: Tensor
    last: Tensor
    count: Tensor

    @classmethod
    def open(cls, prompts: int, rotation: Tensor) -> "DrawnTokens":
        """Return memory for as many tokens as `rotation` has rows."""
        tokens = torch.zeros(prompts, len(rotation), dtype=torch.int64, device=rotation.device)
        sums = torch.zeros(prompts, len(rotation), device=rotation.device)
        return cls(rotation, tokens, sums, tokens.new_zeros(prompts), tokens.new_zeros(1))

    def copy(self) -> Self:
        """Return a copy of the tokens in separate memory."""
        return type(self)(*(tensor.clone() for tensor in list_tensors(self)))

    def add(self, token: Tensor, sums: Tensor) -> Tensor:
        """Add the next token int64 [B] with the sums of its logits float32 [B], and return `last`."""
        self.tokens.index_copy_(1, self.count, token[:, None])
        self.sums.index_copy_(1, self.count, sums[:, None])
        self.count.add_(1)
        return self.last.copy_(token)


class GivenNoise:
    """`Noise` of one step whose random numbers are on the device already."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def draw(self, count: int) -> Tensor:
        """Return the given numbers, float32 [B, count]."""
        return self._numbers


@contextmanager
def hold_noise(noise: Noise, repetitions: Repetitions | None) -> Iterator[Noise]:
    """Yield counter-based noise at addresses that recordings read, and advance `noise` by the draws of the block.

    Other noise is yielded as it is; without recordings, all noise is.
    """
    if repetitions is None or not isinstance(noise, CounterNoise):
        yield noise
        return
    # A copy, since the next generation's noise is written to the same memory.
    held = repetitions.hold(CounterNoise(noise.keys.clone(), noise.step.clone()))
    yield held
    noise.step.copy_(held.step)


def run_step(
    repeat: Repeat | None,
    key: Hashable,
    step: Callable[..., Tensor],
    noise: Noise,
    numbers: int,
    device: torch.device,
    *inputs: Tensor,
) -> Tensor:
    """Run a step, by the recording of a segment's steps if there is one, and return the sampled token int64 [B].

    Args:
        repeat: result of `Cache.open_steps`.
        key: whatever differs between steps and is not an input.
        step: samples a token int64 [B] with a `Noise` and the inputs.
        noise: randomness, per prompt.
        numbers: random numbers that a step takes per prompt; counter-based noise is drawn in the recording.
        device: device of the step.
        inputs: further tensors that the step reads.
    """
    if repeat is None:
        return step(noise, *inputs)
    if not numbers or isinstance(noise, CounterNoise):
        return repeat(key, partial(step, noise), *inputs)
    # Sent before the step, because a recorded copy would send the first numbers again.
    drawn = send(noise.draw(numbers), device)
    return repeat(key, lambda drawn, *others: step(GivenNoise(drawn), *others), drawn, *inputs)
