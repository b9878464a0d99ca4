"""Randomness of a batch: one stream of numbers per prompt."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from kvbench.core.devices import pin, use_device
from kvbench.core.files import derive_seed

MANY = 2**14
"""Numbers of one prompt that take longer to draw than a thread to start."""


class Noise(Protocol):
    """Source of a batch's random numbers."""

    def draw(self, count: int) -> Tensor:
        """Draw Exp(1) variables float32 [prompts, count], the next of each prompt's stream, on the CPU."""
        ...


class PromptNoise:
    """One generator per prompt, seeded by (seed, prompt index): the same noise in any batch, shard or method."""

    def __init__(self, seed: int, indices: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(prompt_seed(seed, index)) for index in indices]

    def draw(self, count: int) -> Tensor:
        """Draw Exp(1) variables float32 [prompts, count]; many of them in threads, since a GPU may be waiting."""

        def row(generator: torch.Generator) -> Tensor:
            return torch.empty(count).exponential_(generator=generator)

        if count < MANY or len(self._generators) == 1:
            return torch.stack([row(generator) for generator in self._generators])
        with ThreadPoolExecutor(min(len(self._generators), os.cpu_count() or 1)) as threads:
            return torch.stack(list(threads.map(row, self._generators)))


class AheadNoise:
    """Noise whose next numbers are drawn by a second thread, while the first one uses those before.

    Args:
        draw: draws the numbers of one step.
        times: steps; no more are drawn.
        thread: where they are drawn, in order.
    """

    def __init__(self, draw: Callable[[], Tensor], times: int, thread: ThreadPoolExecutor) -> None:
        self._draw, self._left, self._thread = draw, times, thread
        self._next: Future[Tensor] | None = None
        self._start()

    def draw(self, count: int) -> Tensor:
        """Return the numbers of the next step, float32 [prompts, count], and have those after it drawn."""
        assert self._next is not None
        numbers = self._next.result()
        assert numbers.shape[1] == count
        self._start()
        return numbers

    def _start(self) -> None:
        self._next = self._thread.submit(self._draw) if self._left else None
        self._left -= 1


@contextmanager
def draw_ahead(noise: Noise, prompts: int, count: int, times: int, device: torch.device) -> Iterator[Noise]:
    """Yield the same noise, drawn a step ahead in a second thread if there are enough numbers, and pinned for a GPU.

    Args:
        noise: of so many `prompts`; used by nobody else until the block ends.
        prompts: rows of a draw.
        count: numbers a prompt and step.
        times: steps.
        device: where the numbers go.
    """
    if prompts * count < MANY:
        yield noise
        return
    with ThreadPoolExecutor(1, initializer=use_device, initargs=(device,)) as thread:
        yield AheadNoise(lambda: pin(noise.draw(count), device), times, thread)


def prompt_seed(seed: int, index: int) -> int:
    """Return the seed of one prompt's generator."""
    return derive_seed(f"{seed}:{index}")
