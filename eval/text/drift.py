"""Divergence from the full cache along texts or images that were read: course over positions, tail, worst places."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.protocol.intervals import bootstrap
from kvbench.forced.record import ScoredText, Unit

MAX_BINS = 16
"""Largest number of bins of the positions of texts."""
BEFORE = 60
"""Number of characters shown before a token."""
TAIL: Mapping[str, float] = {"median": 0.5, "p95": 0.95, "p99": 0.99, "largest": 1.0}
"""Quantiles of KL over the scored tokens of all texts, by name."""

Values = NDArray[np.floating] | NDArray[np.bool_]


class Band(NamedTuple):
    """Mean over texts, with the ends of its 95 % interval, which resamples texts; None for fewer than two texts."""

    mean: float
    low: float | None
    high: float | None


class DivergenceCurve(NamedTuple):
    """Course of the divergence over the scored tokens.

    Attributes:
        unit: what a bin is: some tokens of a text, or a row or a scale of an image.
        edges: first scored token of each bin, from 0, and the number of scored tokens of the longest text.
        kl: KL(full || method) of each bin in nats, the mean of the texts' means.
        same_top1: share of tokens of each bin at which both caches find the same token likeliest.
        tail: quantiles of KL over all scored tokens in nats, by the names of `TAIL`.
    """

    unit: Unit
    edges: tuple[int, ...]
    kl: tuple[Band, ...]
    same_top1: tuple[Band, ...]
    tail: Mapping[str, float]


class WorstPosition(NamedTuple):
    """A scored token at which the method diverges from the full cache.

    Attributes:
        sample: number of the text.
        position: number of the token, 0 for the first scored one.
        before: characters before the token, or the row or scale of a token of an image.
        token: the text's own token.
        likeliest: the likeliest token under the method.
        likeliest_full: the likeliest token under the full cache.
        kl: KL(full || method) in nats.
    """

    sample: int
    position: int
    before: str
    token: str
    likeliest: str
    likeliest_full: str
    kl: float


def trace_drift(readings: Sequence[ScoredText], clusters: Sequence[str]) -> DivergenceCurve:
    """Return the course of the divergence over the positions of at least one text.

    Bins of texts have equal numbers of tokens, one token each if the longest text has at most `MAX_BINS`; bins of
    images are rows or scales. A text that ends before a bin is left out of it.

    Args:
        readings: texts that were read.
        clusters: cluster of each text, by which intervals resample.
    """
    edges = _choose_edges(readings)
    kl = np.concatenate([one.kl for one in readings]).astype(np.float64)
    return DivergenceCurve(
        readings[0].unit,
        edges,
        _average([one.kl for one in readings], clusters, edges, math.inf),
        _average([one.same for one in readings], clusters, edges, 1),
        {name: float(np.quantile(kl, share)) for name, share in TAIL.items()},
    )


def _choose_edges(readings: Sequence[ScoredText]) -> tuple[int, ...]:
    if groups := readings[0].groups:
        return (0, *accumulate(groups))
    longest = max(len(one.kl) for one in readings)
    return (*range(0, longest, -(-longest // MAX_BINS)), longest)


def _average(
    columns: Sequence[Values], clusters: Sequence[str], edges: Sequence[int], most: float
) -> tuple[Band, ...]:
    """Return the mean over texts of a column's mean in each bin; intervals are clipped to 0 and `most`."""
    bands = []
    for start, stop in pairwise(edges):
        known = [number for number, column in enumerate(columns) if len(column) > start]
        means = [float(columns[number][start:stop].mean(dtype=np.float64)) for number in known]
        interval = bootstrap(means, [clusters[number] for number in known])
        clipped = None if interval is None else interval.clip(0, most)
        ends = (None, None) if clipped is None else (clipped.low, clipped.high)
        bands.append(Band(float(np.mean(means)), *ends))
    return tuple(bands)


def find_worst(readings: Iterable[tuple[int, str, ScoredText]], count: int) -> list[WorstPosition]:
    """Return the `count` scored tokens with the largest KL, in descending order; ties are ordered by text and position.

    Args:
        readings: index, prompt and scored tokens of each text; the prompt has the characters before the scored ones.
        count: number of tokens.
    """
    ranked = (
        (-float(one.kl[position]), index, int(position), prompt, one)
        for index, prompt, one in readings
        for position in np.argsort(-one.kl, kind="stable")[:count]
    )
    return [
        _describe(index, position, prompt, one)
        for _, index, position, prompt, one in heapq.nsmallest(count, ranked, key=lambda each: each[:3])
    ]


def _describe(index: int, position: int, prompt: str, one: ScoredText) -> WorstPosition:
    group = sum(end <= position for end in accumulate(one.groups))
    before = f"{one.unit} {group + 1} " if one.groups else one.find_before(prompt, position)[-BEFORE:]
    return WorstPosition(
        sample=index,
        position=position,
        before=before,
        token=one.name_token(one.tokens[position]),
        likeliest=one.name_token(one.likeliest[position]),
        likeliest_full=one.name_token(one.likeliest_full[position]),
        kl=float(one.kl[position]),
    )
