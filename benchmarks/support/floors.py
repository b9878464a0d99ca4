"""Lower bounds of attention by operations and bytes, and the rows that HeatKV's schedule keeps."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.build import ROOT
from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.schedule import Schedule, schedule_evictions
from kvbench.methods.heatkv.scores import AttentionByScale

Ints = NDArray[np.int64]
ORDERS = ROOT / "tests" / "golden" / "heatkv"
SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
"""Sides of the scales of the published orders."""


class Work(NamedTuple):
    """Floating-point operations, and bytes that must be read or written."""

    flops: float
    bytes: float


class Ceilings(NamedTuple):
    """Peak rates of a device: operations per second in a large matrix product, bytes per second in a copy."""

    flops: float
    bytes: float

    def floor(self, work: Work) -> float:
        """Return the minimum seconds of some work: the larger bound by operations and by bytes."""
        return max(work.flops / self.flops, work.bytes / self.bytes)


def heatkv(spec: ModelSpec, budget: Budget, sinks: int) -> tuple[Schedule, str]:
    """Return HeatKV's schedule and the source of its order of heads: published or random."""
    path = ORDERS / f"orders_{spec.name.removeprefix('infinity_')}.npz"
    sides = tuple(segment.height for segment in spec.segments)
    if path.is_file() and sides == SIDES and sinks == 3:
        ranks = np.zeros((len(sides), spec.layers, spec.heads), np.int64)
        ranks[sinks:-1] = np.load(path)["rank"]
        return schedule_evictions(spec, budget, sinks, ranks), "published order of heads"
    method = HeatKV(sinks)
    method.prepare(spec, budget, AttentionByScale().make_random_artifact(spec))
    return method.schedule, "random order of heads"


def past_tokens(spec: ModelSpec, schedule: Schedule) -> Ints:
    """Return the cached tokens that the queries of each scale see, int64 [K, L, H]."""
    lengths = np.array(spec.lengths)
    past = [np.einsum("i,ilh->lh", lengths[:k], ~schedule.absent[k, :k]) for k in range(len(lengths))]
    return np.stack(past).astype(np.int64)


def share_of_full(spec: ModelSpec, past: Ints, scales: slice = slice(None)) -> float:
    """Return operations of attention relative to the full cache, a lower bound of its time, over some or all scales."""
    lengths, ends = (np.array(values)[scales] for values in (spec.lengths, spec.ends))
    seen = (past[scales] + lengths[:, None, None]).sum((1, 2))
    return float((lengths * seen).sum() / (lengths * ends).sum() / spec.all_heads)


def attention(queries: int, keys: Ints, dim: int, sequences: int, itemsize: int) -> Work:
    """Return the work of softmax(q k^T) v.

    Args:
        queries: queries per row.
        keys: keys of each row, past and present.
        dim: channels per head.
        sequences: sequences with these rows.
        itemsize: bytes of an element.
    """
    seen, rows = int(keys.sum()), keys.size
    moved = 2 * seen + 2 * rows * queries
    return Work(4.0 * dim * queries * seen * sequences, float(itemsize * dim * moved * sequences))
