"""Timing of attention at one scale of a model, with random inputs of its shapes."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.support.floors import Ceilings
from kvbench.core.segments import ModelSpec, Segment
from kvbench.kernels.attention_paths import Path
from kvbench.kernels.layout import Layout, Past
from kvbench.kernels.linear import linear
from kvbench.kernels.ragged_attention import ragged_attention
from kvbench.profile.stopwatch import HostClock, StreamClock

INPUT_BYTES = 2**28
"""Minimum bytes of all input sets of a case, so that no cache level contains the next set."""


class Inputs(NamedTuple):
    """Queries, keys and values of a segment [sequences, heads, tokens, D], flat storage [sequences, slots, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class Timer:
    """Median seconds of a call on a device, over input sets in turn.

    On a GPU, events surround every call; a filler before them keeps the device busy while the host launches it.
    """

    device: str
    repeats: int

    def __post_init__(self) -> None:
        self.gpu = torch.device(self.device).type == "cuda"
        # At least 0.2 ms on any GPU; launches of the slowest call take less.
        self._filler = torch.empty(4 * INPUT_BYTES if self.gpu else 0, dtype=torch.uint8, device=self.device)

    def __call__(self, call: Callable[[Inputs], object], sets: list[Inputs]) -> float:
        """Return the median seconds, after two warm-up calls (the first may compile)."""
        clock, marks = StreamClock(self.device) if self.gpu else HostClock(), []
        for repeat in range(self.repeats + 2):
            x = sets[repeat % len(sets)]
            self._filler.zero_()
            start = clock.mark()
            call(x)
            marks.append((start, clock.mark()))
        clock.wait()
        return statistics.median(clock.between(*pair) for pair in marks[2:])


def measure_ceilings(timer: Timer, dtype: torch.dtype) -> Ceilings:
    """Measure the rates of a large matrix product and of a large copy (bytes read plus bytes written)."""
    side, size = (8192, 2**29) if timer.gpu else (768, 2**25)
    a, b = (torch.randn(side, side, device=timer.device).to(dtype) for _ in range(2))
    source = torch.empty(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    unused = [Inputs(a, a, a, a, a)]
    # `@` and `linear` may use different libraries.
    product = min(timer(lambda _: a @ b, unused), timer(lambda _: linear(a, b, None), unused))
    copy = timer(lambda _: target.copy_(source), unused)
    return Ceilings(2 * side**3 / product, 2 * size / copy)


@dataclass
class Case:
    """One scale of a model, for which attention is timed on random inputs. `sequences` are prompts times branches."""

    spec: ModelSpec
    segment: Segment
    sequences: int
    dtype: torch.dtype
    timer: Timer

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of a head, sequences and bytes of an element, arguments of `floors`."""
        return self.spec.head_dim, self.sequences, self.dtype.itemsize

    def inputs(self, slots: int, tokens: int | None = None) -> list[Inputs]:
        """Make random input sets with `slots` slots of storage per sequence; `tokens` defaults to the segment's."""
        spec, queries = self.spec, self.segment.length
        tokens = queries if tokens is None else tokens
        size = self.sequences * (2 * slots + spec.heads * (2 * tokens + queries)) * spec.head_dim
        count = min(8, 1 + INPUT_BYTES // (size * self.dtype.itemsize))
        shapes = [(spec.heads, n, spec.head_dim) for n in (queries, tokens, tokens)]
        shapes += [(slots, spec.head_dim)] * 2  # type: ignore[list-item]
        make = [
            [torch.randn(self.sequences, *shape, device=self.timer.device).to(self.dtype) for shape in shapes]
            for _ in range(count if self.timer.gpu else 1)
        ]
        return [Inputs(q * spec.head_dim**-0.5 / spec.logit_scale, *rest) for q, *rest in make]

    def dense(self, keys: int) -> float:
        """Return the seconds of SDPA with `keys` keys in every row; on a GPU of the faster of two backends."""
        sets, scale = self.inputs(0, keys), self.spec.logit_scale

        def attend(x: Inputs) -> Tensor:
            return F.scaled_dot_product_attention(x.q, x.k, x.v, scale=scale)

        default = self.timer(attend, sets)
        if not self.timer.gpu:
            return default
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return min(default, self.timer(attend, sets))

    def ragged(self, layout: Layout, path: Path) -> float:
        """Return the seconds of ragged attention by a path."""
        scale = self.spec.logit_scale
        return self.timer(
            lambda x: ragged_attention(*x[:3], Past(*x[3:], layout), scale, path=path),
            self.inputs(layout.total),
        )
