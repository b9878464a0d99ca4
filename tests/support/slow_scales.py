"""Slow storage of differences between scales, and random books, factors and scales for it."""

from collections.abc import Mapping
from itertools import product
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment
from tests.support.engine import D, small
from tests.support.slow_attention import make_books
from tests.support.slow_storage import Numbers, SlowStorage, Token

SCALES = small(layers=2, heads=3, sides=(1, 2, 3, 4, 5))


def make_calibration(spec: ModelSpec, factor: float | None = None) -> dict[str, Tensor]:
    """Books, other books of differences, and random factors, half of them 0."""
    books = make_books(spec)
    generator = torch.Generator().manual_seed(3)
    shape = (spec.layers, spec.heads, len(spec.segments) - 1)
    for side in ("keys", "values"):
        drawn = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.5)
        books[f"{side}_factor"] = drawn if factor is None else torch.full(shape, factor)
    return books | {
        f"{name}_residual": book / 2 for name, book in books.items() if not name.endswith("factor")
    }


def draw_scales(spec: ModelSpec, seed: int) -> Tensor:
    """Positions held when a segment starts, bool [K, L, H, positions]: whole scales for a while, then parts."""
    random, count = Random(seed), len(spec.segments)
    seen = torch.zeros(count, spec.layers, spec.heads, spec.segments[-1].end, dtype=torch.bool)
    for layer, head, segment in product(range(spec.layers), range(spec.heads), spec.segments[:-1]):
        whole, rest = (random.randint(segment.index, count - 1) for _ in range(2))
        part = torch.tensor([random.random() < 0.5 for _ in range(segment.length)])
        for at in range(segment.index + 1, count):
            row = seen[at, layer, head, segment.start : segment.end]
            row |= True if at <= whole else part & (at <= rest)
    return seen


def needs(spec: ModelSpec, seen: Tensor, layer: int, head: int, index: int) -> bool:
    """Whether a head holds the whole scale before while it holds any token of a scale, from its first step on."""
    if not index:
        return False
    before, own = spec.segments[index - 1], spec.segments[index]
    held = [seen[at, layer, head] for at in range(index + 1, len(spec.segments))]
    if not held[0][own.start : own.end].any():
        return False
    return all(row[before.start : before.end].all() for row in held if row[own.start : own.end].any())


class SlowScales(SlowStorage):
    """Slow storage of differences; `factors` has the layer's used factors by name, [H, K - 1]."""

    factors: Mapping[str, Tensor]
    _guesses: Mapping[str, Numbers]

    def _guess(self, name: str, head: int, index: int, held: Mapping[int, Token]) -> Numbers:
        """Predict a scale from what is stored of the one before, by torch's own interpolation."""
        before, own = self.spec.segments[index - 1], self.spec.segments[index]
        places = list(range(before.start, before.end))
        tokens = np.stack([held[p].key if name == "keys" else held[p].value for p in places])
        if name == "keys" and self.rotation is not None:
            tokens = self._turn(tokens, places, -1)
        maps = torch.tensor(tokens).T.reshape(1, D, before.height, before.width)
        wide = F.interpolate(maps, (own.height, own.width), mode="bilinear", align_corners=False)
        return (wide.flatten(2)[0].T * self.factors[name][head, index]).numpy()

    def _quantise(
        self, place: tuple[int, int], segment: Segment, exact: Mapping[int, tuple[Numbers, Numbers]]
    ) -> None:
        head, held, index = place[1], self.tokens[place], segment.index
        block = [p - segment.start for p in range(segment.start, segment.end) if p in held and held[p].young]
        used = [name for name in ("keys", "values") if block and self.factors[name][head, index] != 0]
        self._guesses = {name: self._guess(name, head, index, held)[block] for name in used}
        super()._quantise(place, segment, exact)

    def _read_back(self, x: Numbers, name: str, head: int, source: int) -> Numbers:
        if name not in self._guesses:
            return super()._read_back(x, name, head, source)
        guess, books = self._guesses[name], self.books
        assert books is not None
        self.books = {one: books.get(f"{one}_residual", book) for one, book in books.items()}
        read = super()._read_back((x - guess).astype(np.float32), name, head, source)
        self.books = books
        return read + guess
