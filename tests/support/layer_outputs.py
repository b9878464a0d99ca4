"""Attention of a layer written out for each head, and what its output adds to the residual stream."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.shared.calibration import Observer
from tests.support.engine import D, open_cache, run

WIDTH, FOLD = 12, 2
SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (2, 3), (3, 3)]), logit_scale=0.5)
TEXTS = replace(SCALES, name="texts", segments=next_token(3, [4, 4, 4, 4, 3]), branches=1)
both = pytest.mark.parametrize("spec", [SCALES, TEXTS], ids=["scales", "texts"])
Inputs = list[list[tuple[Tensor, ...]]]


def projections(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(spec.layers, WIDTH, spec.heads * FOLD * D, generator=generator)


def observe(observer: Observer, spec: ModelSpec, batches: list[Inputs], passes: int = 1) -> dict[str, Tensor]:
    """What a calibration finds that looks at the batches so many times."""
    cache = open_cache(observer, spec, projection=projections(spec).__getitem__)
    for left in reversed(range(passes)):
        for inputs in batches:
            run(cache, inputs)
        assert observer.needs_another_pass() == (left > 0)
    return observer.average()


def attention(
    spec: ModelSpec, inputs: Inputs, layer: int, k: int
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Sequence, KV head, attention [query heads, queries, positions] and values [positions, D] of a segment."""
    at = spec.segments[k]
    keys, values = (torch.cat([inputs[i][layer][n] for i in range(k + 1)], 2).double() for n in (1, 2))
    q = inputs[k][layer][0].double().unflatten(1, (spec.heads, FOLD))
    for sequence, head in np.ndindex(len(q), spec.heads):
        scores = q[sequence, head] @ keys[sequence, head].mT * spec.logit_scale
        if at.causal:
            own = torch.arange(at.length)
            scores = scores.masked_fill(torch.arange(at.end) > at.start + own[:, None], -torch.inf)
        yield sequence, head, scores.softmax(-1), values[sequence, head]


def project(x: Tensor, spec: ModelSpec, layer: int, head: int) -> Tensor:
    """What query heads' outputs [query heads, ..., D] add to the residual stream."""
    weights = projections(spec)[layer].double().unflatten(1, (spec.heads, FOLD, D))[:, head]
    return torch.einsum("wfd,f...d->f...w", weights, x)
