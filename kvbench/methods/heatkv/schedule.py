"""HeatKV's strict eviction schedule (arXiv:2605.14877, Eq. 5 and Algorithm 1) in exact integers.

Indices of scales, sources, layers and heads start at 0; the paper's scale index is one larger. An atom (i, l, h) is
the tokens of source scale i in head h of layer l.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.core.budget import Budget, InfeasibleBudget, name_budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Ints

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Schedule:
    """Absent atoms at each scale, and the number of remaining tokens.

    Attributes:
        absent: A, bool [K, K, L, H]; [k, i, l, h]: absent at the start of scale k (only sources i < k).
        gone: G, bool [K, K, L, H]: absent by the end of scale k.
        pruned: N, int64 [K]: number of heads that lose each source at scale k, before `fill_budget`.
        cached_after: int64 [K, L]: tokens held after layer l of scale k; the last row while the last scale runs.
        early: int64 [K]: number of atoms evicted early at the start of a scale (|E_k|).
    """

    absent: Bools
    gone: Bools
    pruned: Ints
    cached_after: Ints
    early: Ints


class Unit(NamedTuple):
    """One early eviction: sources of one head, and the number of freed tokens."""

    layer: int
    head: int
    sources: tuple[int, ...]
    tokens: int


def count_pruned_heads(spec: ModelSpec, budget: Budget, sinks: int) -> Ints:
    """Return N_k, the number of heads that lose a source at each scale: int64 [K] (Eq. 5, clamped to [0, T]).

    The last scale has the value of the scale before it.

    Raises:
        ValueError: `sinks` leaves no source scale, or is negative.
        InfeasibleBudget: the sink scales alone exceed the budget.
    """
    scales = len(spec.segments)
    if not 0 <= sinks < scales:
        raise ValueError(f"sinks={sinks}: {spec.name} has {scales} segments; use 0 to {scales - 1}")
    sink_tokens = spec.leading_tokens(sinks)
    if budget.per_head < sink_tokens:
        raise InfeasibleBudget.of_sinks(budget, sinks, sink_tokens, spec)
    counts = np.zeros(scales, np.int64)
    for k in range(sinks, scales - 1):
        surplus = spec.ends[k] - budget.per_head
        if surplus > 0:
            counts[k] = min(ceil(spec.all_heads * surplus / (spec.ends[k] - sink_tokens)), spec.all_heads)
    counts[-1] = counts[-2] if scales > 1 else 0
    return counts


def schedule_evictions(
    spec: ModelSpec, budget: Budget, sinks: int, rank: Ints, *, naive: bool = False
) -> Schedule:
    """Return the schedule of evictions of HeatKV or, with one order for all sources, of Binary-HeatKV.

    `rank` is the rank of each head in the order of a source (0 is pruned first), int64 [K, L, H]; rows of sinks and the
    last row are unused. For Binary-HeatKV it is int64 [L, H]. With `naive`, everything that scale k prunes is evicted
    at its start (the paper's Table 3c).
    """
    counts, scales = count_pruned_heads(spec, budget, sinks), len(spec.segments)
    ranks = np.broadcast_to(rank, (scales, spec.layers, spec.heads))
    gone = np.zeros((scales, *ranks.shape), np.bool_)
    for k in range(sinks, scales):
        pruned = slice(sinks, min(k, scales - 2) + 1)
        gone[k, pruned] = ranks[pruned] < counts[k]
    absent, early = np.zeros_like(gone), np.zeros(scales, np.int64)
    for k in range(1, scales):
        absent[k, :k] = gone[k - 1, :k]
        fresh = gone[k, :k] & ~gone[k - 1, :k]
        if k == scales - 1:
            continue
        if naive:
            early[k] = fresh.sum()
            absent[k, :k] = gone[k, :k]
            continue
        units = _list_units(spec, fresh, ranks, whole_heads=rank.ndim == 2)
        for unit in _evict_early(spec, budget, k, gone, units):
            absent[k, list(unit.sources), unit.layer, unit.head] = True
            early[k] += len(unit.sources)
    return Schedule(absent, gone, counts, count_held_tokens(spec, gone, absent), early)


def fill_budget(spec: ModelSpec, budget: Budget, schedule: Schedule, rank: Ints) -> Schedule:
    """Return a schedule that keeps more atoms to the end, best ranks first, while they fit B at every step.

    Eq. 5 prunes the same number of heads from every source, so up to one head's tokens are unused at the last scale.
    This rule, which is not in the paper, uses them: pruned atoms are tried in descending rank, ties by newest source,
    and an atom is kept from its own scale on if that does not exceed B at any step. `schedule` is the result of
    `schedule_evictions` for the same model, budget and ranks.
    """
    gone, absent, unused = schedule.gone.copy(), schedule.absent.copy(), budget.tokens - schedule.cached_after
    ranks = np.broadcast_to(rank, absent.shape[1:])
    pruned = np.argwhere(absent[-1]).tolist()
    for source, layer, head in sorted(pruned, key=lambda a: (-ranks[tuple(a)], -a[0])):
        added = np.zeros_like(unused)  # 1 at each step at which the atom is absent
        added[source:-1, layer:] += gone[source:-1, source, layer, head, None]
        added[source + 1 : -1, :layer] += absent[source + 1 : -1, source, layer, head, None]
        added[-1] = 1
        if (added * spec.lengths[source] <= unused).all():
            unused -= added * spec.lengths[source]
            gone[source:, source, layer, head] = absent[source:, source, layer, head] = False
    early = np.pad((absent[1:] & ~gone[:-1]).sum((1, 2, 3)), (1, 0))
    return replace(schedule, absent=absent, gone=gone, cached_after=budget.tokens - unused, early=early)


def _list_units(spec: ModelSpec, fresh: Bools, ranks: Ints, *, whole_heads: bool) -> list[Unit]:
    """List newly pruned atoms, bool [sources, L, H], by falling layer, then falling source, then rising rank."""
    atoms, units = np.argwhere(fresh[-1:] if whole_heads else fresh).tolist(), []
    for source, layer, head in sorted(atoms, key=lambda a: (-a[1], -a[0], ranks[tuple(a)])):
        sources = tuple(np.flatnonzero(fresh[:, layer, head]).tolist()) if whole_heads else (source,)
        units.append(Unit(layer, head, sources, sum(spec.lengths[i] for i in sources)))
    return units


def count_held_tokens(spec: ModelSpec, gone: Bools, absent: Bools) -> Ints:
    """Return `Schedule.cached_after`, int64 [K, L], from `gone` and `absent`; the last scale itself is not stored."""
    lengths = np.array(spec.lengths)
    scales = len(spec.segments)
    tokens = np.zeros((scales, spec.layers), np.int64)
    for k in range(scales):
        stored = min(k, scales - 2)
        done = _count_per_layer(lengths[: stored + 1], gone[k, : stored + 1])
        waiting = _count_per_layer(lengths[:k], absent[k, :k])
        tokens[k] = done.cumsum() + waiting.sum() - waiting.cumsum() if k < scales - 1 else waiting.sum()
    return tokens


def _count_per_layer(lengths: Ints, absent: Bools) -> Ints:
    return np.einsum("i,ilh->l", lengths, ~absent, dtype=np.int64)


def _evict_early(spec: ModelSpec, budget: Budget, k: int, gone: Bools, units: Iterable[Unit]) -> list[Unit]:
    """Return the units to evict so that no layer of scale k exceeds B (Algorithm 1).

    Tokens that scale k has not produced yet in later layers are not counted, unlike in the printed Algorithm 2, which
    evicts nearly everything.
    """
    lengths = np.array(spec.lengths)
    done = _count_per_layer(lengths[: k + 1], gone[k, : k + 1]).cumsum()
    waiting = _count_per_layer(lengths[:k], gone[k - 1, :k])
    remaining = iter(units)
    evictions: list[Unit] = []
    for layer in range(spec.layers):
        while int(done[layer]) + int(waiting[layer + 1 :].sum()) > budget.capacity:
            unit = next(remaining, None)
            if unit is None or unit.layer <= layer:
                raise InfeasibleBudget(
                    f"{name_budget(budget)}: nothing left to evict before layer {layer} of scale {k}; raise it"
                )
            waiting[unit.layer] -= unit.tokens
            evictions.append(unit)
    return evictions
