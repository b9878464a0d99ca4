"""Kernels as they are called, at one scale of a model: inputs of its shapes, timed on the device."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.support.floors import Ceilings, Ints
from kvbench.core.segments import ModelSpec, Segment
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.attention_paths import Path
from kvbench.kernels.compact import rebuild_both, source_table
from kvbench.kernels.decode_attention import decode_attention, prepare_rows
from kvbench.kernels.layout import Layout, Past, empty_layout
from kvbench.kernels.linear import linear
from kvbench.kernels.ragged_attention import ragged_attention
from kvbench.methods.heatkv.schedule import Schedule
from kvbench.profile.stopwatch import HostClock, StreamClock

ROTATED = 2**28
"""Bytes that the input sets of one case should exceed together, so that no cache level holds the next one."""


class Inputs(NamedTuple):
    """Queries, keys and values of a segment [sequences, heads, tokens, D], flat storage [sequences, slots, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor


def layout_of(keep: Tensor, room: int = 0) -> Layout:
    """Rows that hold the chosen of the first positions, bool [rows, positions], with room behind them."""
    return source_table(empty_layout(len(keep), keep.device), keep, 0, keep.shape[1], room)[0]


@dataclass
class Timer:
    """Median seconds of a call on a device, over input sets in turn.

    On a GPU, events stand around every call, behind a filler that keeps the device busy while the host launches it.
    """

    device: str
    repeats: int

    def __post_init__(self) -> None:
        self.gpu = torch.device(self.device).type == "cuda"
        # A fifth of a millisecond or more on any GPU: launches of the slowest call take less.
        self._filler = torch.empty(4 * ROTATED if self.gpu else 0, dtype=torch.uint8, device=self.device)

    def __call__(self, call: Callable[[Inputs], object], sets: list[Inputs]) -> float:
        """Times it after two calls that do not count (the first may compile)."""
        clock, marks = StreamClock(self.device) if self.gpu else HostClock(), []
        for repeat in range(self.repeats + 2):
            x = sets[repeat % len(sets)]
            self._filler.zero_()
            start = clock.mark()
            call(x)
            marks.append((start, clock.mark()))
        clock.wait()
        return statistics.median(clock.between(*pair) for pair in marks[2:])


def ceilings(timer: Timer, dtype: torch.dtype) -> Ceilings:
    """Rates of a large matrix product and of a large copy (bytes read and written both count), as seen here."""
    side, size = (8192, 2**29) if timer.gpu else (768, 2**25)
    a, b = (torch.randn(side, side, device=timer.device).to(dtype) for _ in range(2))
    source = torch.empty(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    nothing = [Inputs(a, a, a, a, a)]
    # The library behind one of the two may be the slower one.
    product = min(timer(lambda _: a @ b, nothing), timer(lambda _: linear(a, b, None), nothing))
    copy = timer(lambda _: target.copy_(source), nothing)
    return Ceilings(2 * side**3 / product, 2 * size / copy)


@dataclass
class Case:
    """One scale of a model: makes inputs and times what attends to them.

    Attributes:
        spec: the model.
        at: the scale.
        sequences: prompts times branches.
        dtype: of everything.
        timer: of the device.
    """

    spec: ModelSpec
    at: Segment
    sequences: int
    dtype: torch.dtype
    timer: Timer

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of a head, sequences, bytes of a number: what `floors` counts with."""
        return self.spec.head_dim, self.sequences, self.dtype.itemsize

    def inputs(self, slots: int, tokens: int | None = None, queries: int | None = None) -> list[Inputs]:
        """Random input sets with so many slots of storage a sequence; tokens and queries of the segment by default."""
        spec, tokens = self.spec, self.at.length if tokens is None else tokens
        queries = self.at.length if queries is None else queries
        one = self.sequences * (2 * slots + spec.heads * (2 * tokens + queries)) * spec.head_dim
        count = min(8, 1 + ROTATED // (one * torch.empty((), dtype=self.dtype).element_size()))
        shapes = [(spec.heads, n, spec.head_dim) for n in (queries, tokens, tokens)]
        shapes += [(slots, spec.head_dim)] * 2  # type: ignore[list-item]
        make = [
            [torch.randn(self.sequences, *shape, device=self.timer.device).to(self.dtype) for shape in shapes]
            for _ in range(count if self.timer.gpu else 1)
        ]
        return [Inputs(q * spec.head_dim**-0.5 / spec.logit_scale, *rest) for q, *rest in make]

    def dense(self, keys: int, queries: int | None = None) -> float:
        """Seconds of SDPA with so many keys in every row; on a GPU by the faster of two backends."""
        sets, scale = self.inputs(0, keys, queries), self.spec.logit_scale

        def attend(x: Inputs) -> Tensor:
            return F.scaled_dot_product_attention(x.q, x.k, x.v, scale=scale)

        usual = self.timer(attend, sets)
        if not self.timer.gpu:
            return usual
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return min(usual, self.timer(attend, sets))

    def ragged(self, layout: Layout, path: Path | None = None) -> float:
        """Seconds of ragged attention, by the chosen way unless one is given."""
        scale = self.spec.logit_scale
        return self.timer(
            lambda x: ragged_attention(*x[:3], Past(*x[3:], layout), scale, path=path),
            self.inputs(layout.total),
        )

    def step(self, layout: Layout, queries: int, *, alone: bool = True) -> float:
        """Seconds of attention of one token in the middle of the segment, which is stored as well.

        Args:
            layout: of rows with room for the segment.
            queries: query heads that share a row.
            alone: on a GPU, by the kernel of one token; else by that of several.
        """
        filled, device = self.at.length // 2, self.timer.device
        came = torch.full((1,), filled, dtype=torch.int64, device=device) if alone else None
        sets = self.inputs(layout.capacity, 1, queries)
        rows = {id(x.keys): prepare_rows(Past(x.keys, x.values, layout), filled=came) for x in sets}
        scale = self.spec.logit_scale
        return self.timer(lambda x: decode_attention(*x[:3], rows[id(x.keys)], filled, scale), sets)

    def mass(self, layout: Layout) -> float:
        """Seconds of attention mass."""
        scale = self.spec.logit_scale
        return self.timer(
            lambda x: attention_mass(x.q, x.k, Past(*x[3:], layout), scale), self.inputs(layout.total)
        )

    def rebuild(self, before: Layout, keep: Tensor) -> tuple[float, int]:
        """Seconds of moving keys and values, and the slots there are afterwards."""
        after, source = source_table(before, keep, self.at.start, self.at.length)

        def call(x: Inputs) -> None:
            keys, values = (old.new_empty(len(old), len(source), old.shape[2]) for old in x[3:])
            rebuild_both(x[3:], x[1:3], source, (keys, values))

        return self.timer(call, self.inputs(before.total)), after.total

    def lengths(self, lengths: Ints, room: int = 0) -> Layout:
        """Rows of given lengths, with room behind them."""
        steps = torch.arange(int(lengths.max()), device=self.timer.device)
        return layout_of(steps < torch.from_numpy(lengths).to(self.timer.device).unsqueeze(1), room)


class Held:
    """Rows as HeatKV leaves them.

    Args:
        spec: the model.
        schedule: its schedule.
        device: where layouts are.
    """

    def __init__(self, spec: ModelSpec, schedule: Schedule, device: str) -> None:
        self._heads, self._device = spec.heads, device
        self._absent = torch.from_numpy(schedule.absent).to(device)
        self._starts = torch.tensor([segment.start for segment in spec.segments], device=device)

    def layout(self, layer: int, at: Segment) -> Layout:
        """Of a layer when a scale starts."""
        return layout_of(
            self.kept(layer, at.index, torch.arange(at.start, device=self._device).expand(self._heads, -1))
        )

    def kept(self, layer: int, scale: int, positions: Tensor) -> Tensor:
        """Whether heads hold positions [heads, n] when a scale starts, bool of that shape."""
        source = torch.bucketize(positions.clamp(min=0).contiguous(), self._starts, right=True) - 1
        return ~self._absent[scale, :, layer].T.gather(1, source)
