"""Timing of kernels at one scale of a model, with random inputs of its shapes."""

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
from kvbench.kernels.decode_attention import decode_attention, decode_token, prepare_rows
from kvbench.kernels.layout import Layout, Past, empty_layout, place_rows
from kvbench.kernels.linear import linear
from kvbench.kernels.ragged_attention import ragged_attention
from kvbench.methods.heatkv.schedule import Schedule
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


def layout_of(keep: Tensor, free_slots: int = 0) -> Layout:
    """Return the layout of rows with the positions in `keep`, bool [rows, positions], and free slots after them."""
    return source_table(empty_layout(len(keep), keep.device), keep, 0, keep.shape[1], free_slots)[0]


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
    # The two may use different libraries.
    product = min(timer(lambda _: a @ b, unused), timer(lambda _: linear(a, b, None), unused))
    copy = timer(lambda _: target.copy_(source), unused)
    return Ceilings(2 * side**3 / product, 2 * size / copy)


@dataclass
class Case:
    """One scale of a model; makes inputs and times kernels on them. `sequences` are prompts times branches."""

    spec: ModelSpec
    segment: Segment
    sequences: int
    dtype: torch.dtype
    timer: Timer

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of a head, sequences and bytes of a number, arguments of `floors`."""
        return self.spec.head_dim, self.sequences, self.dtype.itemsize

    def inputs(self, slots: int, tokens: int | None = None, queries: int | None = None) -> list[Inputs]:
        """Draw input sets with `slots` slots of storage per sequence; tokens and queries default to the segment's."""
        spec, tokens = self.spec, self.segment.length if tokens is None else tokens
        queries = self.segment.length if queries is None else queries
        size = self.sequences * (2 * slots + spec.heads * (2 * tokens + queries)) * spec.head_dim
        count = min(8, 1 + INPUT_BYTES // (size * torch.empty((), dtype=self.dtype).element_size()))
        shapes = [(spec.heads, n, spec.head_dim) for n in (queries, tokens, tokens)]
        shapes += [(slots, spec.head_dim)] * 2  # type: ignore[list-item]
        make = [
            [torch.randn(self.sequences, *shape, device=self.timer.device).to(self.dtype) for shape in shapes]
            for _ in range(count if self.timer.gpu else 1)
        ]
        return [Inputs(q * spec.head_dim**-0.5 / spec.logit_scale, *rest) for q, *rest in make]

    def dense(self, keys: int, queries: int | None = None) -> float:
        """Return the seconds of SDPA with `keys` keys in every row; on a GPU of the faster of two backends."""
        sets, scale = self.inputs(0, keys, queries), self.spec.logit_scale

        def attend(x: Inputs) -> Tensor:
            return F.scaled_dot_product_attention(x.q, x.k, x.v, scale=scale)

        default = self.timer(attend, sets)
        if not self.timer.gpu:
            return default
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return min(default, self.timer(attend, sets))

    def ragged(self, layout: Layout, path: Path | None = None) -> float:
        """Return the seconds of ragged attention, by the chosen path unless `path` is set."""
        scale = self.spec.logit_scale
        return self.timer(
            lambda x: ragged_attention(*x[:3], Past(*x[3:], layout), scale, path=path),
            self.inputs(layout.total),
        )

    def step(self, layout: Layout, queries: int, *, alone: bool = True) -> float:
        """Return the seconds of attention and storage of one token in the middle of the segment.

        Args:
            layout: layout with free slots for the segment.
            queries: query heads that share a row.
            alone: on a GPU, use the kernel for one token; else the kernel for several.
        """
        filled, device, scale = self.segment.length // 2, self.timer.device, self.spec.logit_scale
        sets = self.inputs(layout.capacity, 1, queries)
        pasts = {id(x.keys): Past(x.keys, x.values, layout) for x in sets}
        if alone and torch.device(device).type == "cuda":
            counter = torch.full((1,), filled, dtype=torch.int64, device=device)
            placed = {key: place_rows(past, counter) for key, past in pasts.items()}
            return self.timer(lambda x: decode_token(*x[:3], placed[id(x.keys)], scale), sets)
        rows = {key: prepare_rows(past) for key, past in pasts.items()}
        return self.timer(lambda x: decode_attention(*x[:3], rows[id(x.keys)], filled, scale), sets)

    def mass(self, layout: Layout) -> float:
        """Return the seconds of attention mass."""
        scale = self.spec.logit_scale
        return self.timer(
            lambda x: attention_mass(x.q, x.k, Past(*x[3:], layout), scale), self.inputs(layout.total)
        )

    def rebuild(self, before: Layout, keep: Tensor) -> tuple[float, int]:
        """Return the seconds of moving keys and values, and the slots afterwards."""
        after, source = source_table(before, keep, self.segment.start, self.segment.length)

        def call(x: Inputs) -> None:
            keys, values = (old.new_empty(len(old), len(source), old.shape[2]) for old in x[3:])
            rebuild_both(x[3:], x[1:3], source, (keys, values))

        return self.timer(call, self.inputs(before.total)), after.total

    def lengths(self, lengths: Ints, free_slots: int = 0) -> Layout:
        """Return the layout of rows of given lengths, with free slots after them."""
        steps = torch.arange(int(lengths.max()), device=self.timer.device)
        return layout_of(steps < torch.from_numpy(lengths).to(self.timer.device).unsqueeze(1), free_slots)


class HeatKVRows:
    """Rows under HeatKV's schedule."""

    def __init__(self, spec: ModelSpec, schedule: Schedule, device: str) -> None:
        self._heads, self._device = spec.heads, device
        self._absent = torch.from_numpy(schedule.absent).to(device)
        self._starts = torch.tensor([segment.start for segment in spec.segments], device=device)

    def layout(self, layer: int, segment: Segment) -> Layout:
        """Return the layout of a layer when a scale starts."""
        positions = torch.arange(segment.start, device=self._device).expand(self._heads, -1)
        return layout_of(self.mask(layer, segment.index, positions))

    def mask(self, layer: int, scale: int, positions: Tensor) -> Tensor:
        """Return whether heads store positions [heads, n] when a scale starts, bool of that shape."""
        source = torch.bucketize(positions.clamp(min=0).contiguous(), self._starts, right=True) - 1
        return ~self._absent[scale, :, layer].T.gather(1, source)
