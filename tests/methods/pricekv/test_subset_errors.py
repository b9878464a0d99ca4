"""What is calibrated: the error of every set of past blocks is that of attention in which the others are masked."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.pricekv.errors import Importance, SubsetError
from kvbench.methods.pricekv.problem import list_sources
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View
from tests.support.engine import D, open_cache, prepared, run, tokens_of

SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (2, 3), (3, 3)]), logit_scale=0.5)
ROWS = replace(SCALES, segments=next_token(3, [4, 4, 4, 4, 3]))
WIDTH, FOLD = 12, 2


def projections(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(spec.layers, WIDTH, spec.heads * FOLD * D, generator=generator)


def calibrated(spec: ModelSpec, observer: SubsetError, weights: Tensor | None) -> Tensor:
    projection = None if weights is None else weights.__getitem__
    cache = open_cache(observer, spec, projection=projection)
    run(cache, tokens_of(spec, 2 * spec.branches, groups=FOLD))
    return observer.average()["error"]


def attended(
    spec: ModelSpec, layer: int, segment: int, left: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and attention to what is left of some queries, [sequences, query heads, ...], masked by hand."""
    inputs, at = tokens_of(spec, 2 * spec.branches, groups=FOLD), spec.segments[segment]
    k, v = (torch.cat([inputs[i][layer][n] for i in range(segment + 1)], 2).double() for n in (1, 2))
    keys, values = (x.repeat_interleave(FOLD, 1) for x in (k, v))
    seen = torch.zeros(at.end, dtype=torch.bool)
    for i in (*left, segment):
        seen[spec.segments[i].start : spec.segments[i].end] = True
    count = min(3, at.length)
    for query in [i * at.length // count for i in range(count)]:
        q = inputs[segment][layer][0][:, :, query, None].double()
        scores = (q @ keys.mT)[:, :, 0] * spec.logit_scale
        if at.causal:
            scores[..., at.start + query + 1 :] = -torch.inf
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        yield (weights[:, :, None] @ values)[:, :, 0], (scores.softmax(-1) * seen).sum(-1)


@pytest.mark.parametrize(("spec", "recent"), [(SCALES, 1), (ROWS, 8), (ROWS, 2)])
@pytest.mark.parametrize("importance", ["output", "mass"])
@pytest.mark.parametrize("projected", [True, False])
def test_errors_are_those_of_masked_attention(
    spec: ModelSpec, recent: int, importance: Importance, projected: bool
) -> None:
    weights = projections(spec) if projected else None
    found = calibrated(spec, SubsetError(importance, queries=3, recent=recent), weights)
    expected = torch.zeros_like(found)
    entry = 0
    for at, sources in zip(spec.segments[1:], list_sources(spec, recent)[1:], strict=True):
        for number in range(1 << len(sources)):
            left = [source for bit, source in enumerate(sources) if number >> bit & 1]
            for layer in range(spec.layers):
                full = attended(spec, layer, at.index, range(at.index))
                errors = []
                for (o, kept), (whole, _) in zip(attended(spec, layer, at.index, left), full, strict=True):
                    apart = o - whole
                    if projected:
                        heads = projections(spec)[layer].double().unflatten(1, (spec.heads * FOLD, D))
                        apart = torch.einsum("whd,shd->shw", heads, apart)
                    errors.append(apart.square().sum(-1) if importance == "output" else 1 - kept)
                of_heads = torch.stack(errors).mean((0, 1)).unflatten(0, (spec.heads, FOLD)).sum(-1)
                expected[layer, :, entry] = of_heads
            entry += 1
    assert entry == found.shape[-1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_rows_have_the_prompt_and_the_newest_rows_as_sources_and_scales_all() -> None:
    assert list_sources(SCALES, 1) == ((), (0,), (0, 1), (0, 1, 2))
    assert list_sources(ROWS, 2) == ((), (0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4))


def test_a_projection_by_heads_is_the_projection() -> None:
    weights, seen = projections(SCALES), []

    class Asks(Full):
        static = False

        def keep(self, view: View) -> None:
            seen.append(view.output_projection())

    method: Method = prepared(Asks(), SCALES)
    inputs = tokens_of(SCALES, 2, groups=FOLD)
    out = run(KVCache(SCALES, method, dtype=torch.float32, projection=weights.__getitem__), inputs)
    expected = out[0].transpose(1, 2).flatten(2) @ weights[0].T
    found = torch.einsum("hgwd,shgtd->stw", seen[0], out[0].unflatten(1, (SCALES.heads, FOLD)))
    torch.testing.assert_close(found, expected)
    run(KVCache(SCALES, method, dtype=torch.float32), inputs)
    assert seen[-1] is None
