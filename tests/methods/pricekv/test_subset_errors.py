"""What is calibrated: the error of every set of past blocks is that of attention in which the others are masked."""

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
from tests.support.layer_outputs import FOLD, attention, project, projections

SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (2, 3), (3, 3)]), logit_scale=0.5)
ROWS = replace(SCALES, segments=next_token(3, [4, 4, 4, 4, 3]))


def calibrated(spec: ModelSpec, observer: SubsetError, weights: Tensor | None) -> Tensor:
    projection = None if weights is None else weights.__getitem__
    cache = open_cache(observer, spec, projection=projection)
    run(cache, tokens_of(spec, 2 * spec.branches, groups=FOLD))
    return observer.average()["error"]


@pytest.mark.parametrize(("spec", "recent"), [(SCALES, 1), (ROWS, 8), (ROWS, 2)])
@pytest.mark.parametrize("importance", ["output", "mass"])
@pytest.mark.parametrize("projected", [True, False])
def test_errors_are_those_of_masked_attention(
    spec: ModelSpec, recent: int, importance: Importance, projected: bool
) -> None:
    weights = projections(spec) if projected else None
    found = calibrated(spec, SubsetError(importance, queries=3, recent=recent), weights)
    expected, entry = torch.zeros_like(found), 0
    inputs = tokens_of(spec, 2 * spec.branches, groups=FOLD)
    for at, sources in zip(spec.segments[1:], list_sources(spec, recent)[1:], strict=True):
        count = min(3, at.length)
        asking = [i * at.length // count for i in range(count)]
        for number in range(1 << len(sources)):
            seen = torch.zeros(at.end, dtype=torch.bool)
            for i in (*(source for bit, source in enumerate(sources) if number >> bit & 1), at.index):
                seen[spec.segments[i].start : spec.segments[i].end] = True
            for layer in range(spec.layers):
                for _, head, p, v in attention(spec, inputs, layer, at.index):
                    whole = p[:, asking]
                    kept = (whole * seen).sum(-1, keepdim=True)
                    apart = (whole * seen / kept) @ v - whole @ v
                    apart = project(apart, spec, layer, head) if projected else apart
                    error = apart.square().sum(-1) if importance == "output" else 1 - kept[..., 0]
                    expected[layer, head, entry] += error.mean(1).sum() / 2 / spec.branches
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
