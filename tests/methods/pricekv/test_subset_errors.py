"""What is calibrated: the error of every set of past blocks is that of attention in which the others are masked."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.engine.cache import KVCache
from kvbench.methods.base import Method, View
from kvbench.methods.full import Full
from kvbench.methods.pricekv.blocks import Blocks, group_segments
from kvbench.methods.pricekv.errors import Importance, SubsetError
from tests.support.engine import D, prepared, run, tokens_of

SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (2, 3), (3, 3)]), logit_scale=0.5)
ROWS = replace(SCALES, segments=next_token(3, [4, 4, 4, 4, 3]))
WIDTH, FOLD = 12, 2


def projections(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(spec.layers, WIDTH, spec.heads * FOLD * D, generator=generator)


def calibrated(spec: ModelSpec, observer: SubsetError, weights: Tensor | None) -> Tensor:
    projection = None if weights is None else weights.__getitem__
    cache = KVCache(spec, prepared(observer, spec), dtype=torch.float32, projection=projection)
    run(cache, spec, tokens_of(spec, 2 * spec.branches, groups=FOLD))
    return observer.average()["error"]


def attended(
    spec: ModelSpec, blocks: Blocks, layer: int, segment: int, held: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and attention to what is left of some queries, [sequences, query heads, queries, ...], masked by hand."""
    inputs = tokens_of(spec, 2 * spec.branches, groups=FOLD)
    block = blocks.of_segment[segment]
    k, v = (torch.cat([inputs[i][layer][n] for i in range(segment + 1)], 2).double() for n in (1, 2))
    of_token = torch.cat([torch.full((n,), b) for n, b in zip(spec.lengths, blocks.of_segment, strict=True)])
    at, q = spec.segments[segment], inputs[segment][layer][0].double()
    count = min(3, at.length)
    for query in [i * at.length // count for i in range(count)]:
        seen = torch.tensor(
            [b == block or held >> b & 1 for b in of_token[: at.end].tolist()], dtype=torch.bool
        )
        if at.causal:
            seen[at.start + query + 1 :] = False
        keys, values = (x.repeat_interleave(FOLD, 1) for x in (k, v))
        scores = (q[:, :, query, None] @ keys.mT)[:, :, 0] * spec.logit_scale
        everything = scores.clone()
        if at.causal:
            everything[..., at.start + query + 1 :] = -torch.inf
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        yield (weights[:, :, None] @ values)[:, :, 0], (everything.softmax(-1) * seen).sum(-1)


@pytest.mark.parametrize(("spec", "most"), [(SCALES, 13), (ROWS, 13), (ROWS, 4)])
@pytest.mark.parametrize("importance", ["output", "mass"])
@pytest.mark.parametrize("projected", [True, False])
def test_errors_are_those_of_masked_attention(
    spec: ModelSpec, most: int, importance: Importance, projected: bool
) -> None:
    weights = projections(spec) if projected else None
    found = calibrated(spec, SubsetError(importance, queries=3, blocks=most), weights)
    blocks = group_segments(spec, most)
    expected = torch.zeros_like(found)
    for layer in range(spec.layers):
        for at in spec.segments[1:]:
            block = blocks.of_segment[at.index]
            if block == 0:
                continue
            full = list(attended(spec, blocks, layer, at.index, (1 << block) - 1))
            for held in range(1 << block):
                errors = []
                for (o, lost), (whole, _) in zip(
                    attended(spec, blocks, layer, at.index, held), full, strict=True
                ):
                    apart = o - whole
                    if projected:
                        heads = projections(spec)[layer].double().unflatten(1, (spec.heads * FOLD, D))
                        apart = torch.einsum("whd,shd->shw", heads, apart)
                    errors.append(apart.square().sum(-1) if importance == "output" else 1 - lost)
                of_heads = torch.stack(errors).mean((0, 1)).unflatten(0, (spec.heads, FOLD)).sum(-1)
                share = at.length / blocks.lengths[block]
                expected[layer, :, (1 << block) - 2 + held] += share * of_heads
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for block in range(1, len(blocks.lengths)):
        assert (found[..., (2 << block) - 3].abs() < 1e-6).all()  # of the full set


def test_blocks_are_segments_until_there_are_too_many() -> None:
    assert group_segments(SCALES, 13) == Blocks((0, 1, 2, 3), (1, 4, 6, 9), (0, 0, 0, 0))
    assert group_segments(ROWS, 4) == Blocks((0, 1, 1, 2, 2, 3), (3, 8, 8, 3), (0, 4, 4, 0))


def test_a_projection_by_heads_is_the_projection() -> None:
    weights, seen = projections(SCALES), []

    class Asks(Full):
        static = False

        def keep(self, view: View) -> None:
            seen.append(view.output_projection())

    method: Method = prepared(Asks(), SCALES)
    inputs = tokens_of(SCALES, 2, groups=FOLD)
    out = run(KVCache(SCALES, method, dtype=torch.float32, projection=weights.__getitem__), SCALES, inputs)
    expected = out[0].transpose(1, 2).flatten(2) @ weights[0].T
    found = torch.einsum("hgwd,shgtd->stw", seen[0], out[0].unflatten(1, (SCALES.heads, FOLD)))
    torch.testing.assert_close(found, expected)
    run(KVCache(SCALES, method, dtype=torch.float32), SCALES, inputs)
    assert seen[-1] is None
