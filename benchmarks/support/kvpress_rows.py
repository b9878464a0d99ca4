"""Agreement of readings of the same texts: heads, scores, logits and divergence from the full cache."""

from collections.abc import Iterable, Sequence
from math import inf
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.support.kvpress_reading import PressResult

Pair = tuple[PressResult, PressResult]
"""A reading under a press, and the engine's reading of the same text."""


class Compared(NamedTuple):
    """Readings of one text.

    Attributes:
        full: with transformers' full cache.
        native: under the press, and under the method.
        padded: the same after padding; None without padding.
        guest: under the press, and under `method=kvpress`; None without.
        guest_padded: the same after padding; None without padding.
    """

    full: PressResult
    native: Pair
    padded: Pair | None = None
    guest: Pair | None = None
    guest_padded: Pair | None = None


class Row(NamedTuple):
    """Agreement of a method with its press over all texts.

    Attributes:
        native: heads that keep other tokens under the method.
        padded: the same after padding.
        guest: heads that keep other tokens under `method=kvpress`.
        guest_padded: the same after padding.
        gap: largest result of `measure_gap`.
        logits: largest difference of logits over the forced tokens.
        press_kl: KL(full || compressed) of the next token under the press, in nats, mean over the forced tokens.
        method_kl: the same under the method.
        press_ms: processor milliseconds of a forced token under the press.
        method_ms: the same under the method.
    """

    native: int
    padded: int | None
    guest: int | None
    guest_padded: int | None
    gap: float
    logits: float
    press_kl: float
    method_kl: float
    press_ms: float
    method_ms: float


COLUMNS = {
    "differ": "d", "padded": "d", "guest": "d", "guest, padded": "d", "scores": ".0e", "logits": ".0e",
    "KL, kvpress": ".3f", "KL": ".3f", "ms, kvpress": ".0f", "ms": ".0f",
}  # fmt: skip
"""Headings and formats of the fields of a `Row`."""


def join_texts(texts: Sequence[Compared]) -> Row:
    """Return the row of a method from the comparisons of all texts."""
    native = [text.native for text in texts]
    sides = list(zip(*native, strict=True))
    return Row(
        _count_all(native) or 0,
        *(_count_all([getattr(text, name) for text in texts]) for name in Compared._fields[2:]),
        max(measure_gap(*pair) for pair in native),
        max(float((theirs.logits - ours.logits).abs().max()) for theirs, ours in native),
        *(mean(measure_kl(t.full, one) for t, one in zip(texts, side, strict=True)) for side in sides),
        *(1e3 * median(one.seconds for one in side) for side in sides),
    )


def _count_all(pairs: Iterable[Pair | None]) -> int | None:
    counts = [count_unequal(*pair) for pair in pairs if pair is not None]
    return sum(counts) if counts else None


def count_unequal(theirs: PressResult, ours: PressResult) -> int:
    """Return the number of heads that keep other tokens."""
    layers = zip(theirs.kept, ours.kept, strict=True)
    return sum(a != b for x, y in layers for a, b in zip(x, y, strict=True))


def measure_kl(full: PressResult, compressed: PressResult) -> float:
    """Return KL(full || compressed) of the next token in nats, mean over the forced tokens."""
    p, q = (reading.logits.double().log_softmax(-1) for reading in (full, compressed))
    return float((p.exp() * (p - q)).sum(-1).mean())


def measure_gap(theirs: PressResult, ours: PressResult) -> float:
    """Return the largest relative difference of the press's scores between tokens that only one side keeps.

    0 if there are none or the scores are equal: an exact tie. The tokens of a layer's heads are paired in the order of
    their scores; infinity if they are not equally many.
    """
    gap = 0.0
    for layer, scores in enumerate(theirs.scores):
        a, b = theirs.kept[layer], ours.kept[layer]
        one, other = _score_alone(scores, a, b), _score_alone(scores, b, a)
        if len(one) != len(other):
            return inf
        if len(one):
            size = torch.maximum(one.abs(), other.abs()).clamp(min=1e-30)
            gap = max(gap, float(((one - other).abs() / size).max()))
    return gap


def _score_alone(scores: Tensor, kept: list[set[int]], others: list[set[int]]) -> Tensor:
    """Return the ascending scores of the tokens that heads keep and `others` do not."""
    heads = enumerate(zip(kept, others, strict=True))
    return torch.cat([scores[head, list(a - b)] for head, (a, b) in heads]).double().sort().values
