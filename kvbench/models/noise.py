"""Random numbers of a batch: one stream per prompt on the host, or counter-based noise on the device."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvbench.core.devices import pin, use_device
from kvbench.core.files import derive_seed
from kvbench.kernels.philox import DRAW, draw_integers, make_exponential

Kind = Literal["stream", "counter"]
"""Kinds of noise: `PromptNoise` and `CounterNoise`."""

MIN_THREADED = 2**14
"""Count of random numbers from which drawing takes longer than starting a thread."""


class Noise(Protocol):
    """Source of a batch's random numbers, separate for each prompt."""

    def draw(self, count: int) -> Tensor:
        """Draw the next Exp(1) variables of each prompt, float32 [prompts, count], on the CPU or a GPU."""
        ...


class PromptNoise:
    """One generator per prompt, seeded by (seed, prompt index): the same noise in any batch, shard or method."""

    def __init__(self, seed: int, indices: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(prompt_seed(seed, index)) for index in indices]

    def draw(self, count: int) -> Tensor:
        """Draw Exp(1) variables float32 [prompts, count], in threads if `count` is at least `MIN_THREADED`."""

        def row(generator: torch.Generator) -> Tensor:
            return torch.empty(count).exponential_(generator=generator)

        if count < MIN_THREADED or len(self._generators) == 1:
            return torch.stack([row(generator) for generator in self._generators])
        with ThreadPoolExecutor(min(len(self._generators), os.cpu_count() or 1)) as threads:
            return torch.stack(list(threads.map(row, self._generators)))


@dataclass(frozen=True)
class CounterNoise:
    """Counter-based noise: a function of seed, prompt, step, purpose and code, in any batch, shard, method or device.

    There is no state on the host, so a recorded CUDA graph draws new numbers at each repetition. A draw reads the
    fields and calls `advance`.

    Attributes:
        keys: int64 [prompts], each prompt's key of Philox.
        step: int64 [1], draws so far.
    """

    keys: Tensor
    step: Tensor

    def draw(self, count: int) -> Tensor:
        """Draw Exp(1) variables float32 [prompts, count] on the device of the keys, for models without a kernel."""
        numbers = draw_integers(self.keys, self.step, DRAW, 1, count)
        self.advance()
        return make_exponential(numbers).squeeze(1)

    def advance(self) -> None:
        """Count a draw on the device, in place."""
        self.step.add_(1)


class AheadNoise:
    """Noise of `steps` steps, which a second thread draws one step ahead, in order."""

    def __init__(self, draw: Callable[[], Tensor], steps: int, thread: ThreadPoolExecutor) -> None:
        self._draw, self._left, self._thread = draw, steps, thread
        self._next: Future[Tensor] | None = None
        self._start()

    def draw(self, count: int) -> Tensor:
        """Return the numbers of the next step, float32 [prompts, count], and start drawing the step after it."""
        assert self._next is not None
        numbers = self._next.result()
        assert numbers.shape[1] == count
        self._start()
        return numbers

    def _start(self) -> None:
        self._next = self._thread.submit(self._draw) if self._left else None
        self._left -= 1


@contextmanager
def draw_ahead(noise: Noise, prompts: int, count: int, steps: int, device: torch.device) -> Iterator[Noise]:
    """Yield the same noise, drawn a step ahead in a second thread if a step draws many numbers, and pinned for a GPU.

    Each step draws [prompts, count]. Only the block may use `noise` until it ends. Counter-based noise needs no thread.
    """
    if isinstance(noise, CounterNoise) or prompts * count < MIN_THREADED:
        yield noise
        return
    with ThreadPoolExecutor(1, initializer=use_device, initargs=(device,)) as thread:
        yield AheadNoise(lambda: pin(noise.draw(count), device), steps, thread)


def make_noise(kind: str, seed: int, indices: Sequence[int], device: torch.device | str) -> Noise:
    """Return noise of a `Kind` for some prompts, by their indices, for a model on a device."""
    if kind == "stream":
        return PromptNoise(seed, indices)
    keys = torch.tensor([prompt_seed(seed, index) for index in indices], dtype=torch.int64)
    return CounterNoise(keys.to(device), torch.zeros(1, dtype=torch.int64, device=device))


def prompt_seed(seed: int, index: int) -> int:
    """Return the seed of a prompt's generator, from 0 to 2^63 - 1, derived from a run's seed and the prompt's index."""
    return derive_seed(f"{seed}:{index}")
