"""Divergence from the full cache over scored texts or images: mean by position, tail, worst positions."""

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
"""Maximum number of bins of text positions."""
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
    """Divergence over the positions of the scored tokens.

    Attributes:
        unit: meaning of a bin: some tokens of a text, or a row or a scale of an image.
        edges: first scored token of each bin, from 0, and the number of scored tokens of the longest text.
        kl: KL(full || method) of each bin in nats, the mean of the texts' means.
        same_top1: share of tokens of each bin at which both caches have the same top-1.
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
        sample: index of the text.
        position: index of the token, 0 for the first scored token.
        before: characters before the token, or the row or scale of a token of an image.
        token: the text's own token.
        likeliest: the top-1 token under the method.
        likeliest_full: the top-1 token under the full cache.
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
    """Return the divergence of one or more scored texts over positions.

    Bins of texts have equal numbers of tokens, one token each if the longest text has at most `MAX_BINS`; bins of
    images are rows or scales. A text that ends before a bin is left out of it.

    Args:
        readings: scored texts, or scored images of one model.
        clusters: cluster of each text, by which intervals resample.
    """
    edges = _choose_edges(readings)
    kl = np.concatenate([reading.kl for reading in readings]).astype(np.float64)
    return DivergenceCurve(
        readings[0].unit,
        edges,
        _average([reading.kl for reading in readings], clusters, edges, math.inf),
        _average([reading.same for reading in readings], clusters, edges, 1),
        {name: float(np.quantile(kl, share)) for name, share in TAIL.items()},
    )


def _choose_edges(readings: Sequence[ScoredText]) -> tuple[int, ...]:
    if groups := readings[0].groups:
        return (0, *accumulate(groups))
    longest = max(len(reading.kl) for reading in readings)
    return (*range(0, longest, -(-longest // MAX_BINS)), longest)


def _average(
    columns: Sequence[Values], clusters: Sequence[str], edges: Sequence[int], most: float
) -> tuple[Band, ...]:
    """Return the mean over texts of a column's mean in each bin; intervals are clipped to 0 and `most`."""
    bands = []
    for start, stop in pairwise(edges):
        known = [index for index, column in enumerate(columns) if len(column) > start]
        means = [float(columns[index][start:stop].mean(dtype=np.float64)) for index in known]
        interval = bootstrap(means, [clusters[index] for index in known])
        clipped = None if interval is None else interval.clip(0, most)
        ends = (None, None) if clipped is None else (clipped.low, clipped.high)
        bands.append(Band(float(np.mean(means)), *ends))
    return tuple(bands)


def find_worst(readings: Iterable[tuple[int, str, ScoredText]], count: int) -> list[WorstPosition]:
    """Return the `count` scored tokens with the largest KL, in descending order; ties are ordered by text and position.

    Args:
        readings: index, prompt and scores of each text; the prompt has the characters before the scored tokens.
        count: number of tokens.
    """
    ranked = (
        (-float(text.kl[position]), index, int(position), prompt, text)
        for index, prompt, text in readings
        for position in np.argsort(-text.kl, kind="stable")[:count]
    )
    return [
        _describe(index, position, prompt, text)
        for _, index, position, prompt, text in heapq.nsmallest(count, ranked, key=lambda each: each[:3])
    ]


def _describe(index: int, position: int, prompt: str, text: ScoredText) -> WorstPosition:
    group = sum(end <= position for end in accumulate(text.groups))
    before = f"{text.unit} {group + 1} " if text.groups else text.find_before(prompt, position)[-BEFORE:]
    return WorstPosition(
        sample=index,
        position=position,
        before=before,
        token=text.name_token(text.tokens[position]),
        likeliest=text.name_token(text.likeliest[position]),
        likeliest_full=text.name_token(text.likeliest_full[position]),
        kl=float(text.kl[position]),
    )
