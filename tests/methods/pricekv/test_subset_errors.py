"""Calibration of PriceKV by blocks: errors of sets of past blocks by masked attention, and of their precisions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.engine.view import CacheView
from kvbench.methods.pricekv.errors import Importance, SubsetError
from kvbench.methods.pricekv.noise import PrecisionError, list_precisions
from kvbench.methods.pricekv.problem import list_sources
from kvbench.methods.shared.precision import Precision
from tests.support.engine import D, open_cache, run, tokens_of
from tests.support.layer_outputs import FOLD, SCALES, attention, project, projections

ROWS = replace(SCALES, segments=next_token(3, [4, 4, 4, 4, 3]))


def calibrated(spec: ModelSpec, observer: SubsetError, weights: Tensor | None) -> Tensor:
    projection = None if weights is None else weights.__getitem__
    cache = open_cache(observer, spec, projection=projection)
    run(cache, tokens_of(spec, 2 * spec.branches, groups=FOLD))
    return observer.average()["error"]


@pytest.mark.parametrize(
    ("spec", "recent", "importance", "projected"),
    [
        (SCALES, 1, "output", True),
        (SCALES, 1, "mass", False),
        (ROWS, 8, "output", False),
        (ROWS, 2, "output", True),
        (ROWS, 2, "mass", True),
    ],
)
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


def test_rows_have_the_prompt_and_the_newest_rows_as_sources() -> None:
    assert list_sources(ROWS, 2) == ((), (0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4))


FEW_SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (2, 3)]), logit_scale=0.5)
FEW_ROWS = replace(FEW_SCALES, segments=next_token(3, [4, 4, 3]))
MENU = list_precisions((16, 3), shared=True)


def blur(x: Tensor) -> Tensor:
    """A precision of three bits, as far as these tests know: halves."""
    return (2 * x).round() / 2


@pytest.fixture
def blurring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without codebooks: whatever has fewer than 16 bits is blurred."""

    def read_back(
        _: CacheView, keys: Tensor, values: Tensor, at: Segment, bits: int
    ) -> tuple[Tensor, Tensor]:
        assert keys.shape[1] == values.shape[1] == at.length
        return (keys, values) if bits == 16 else (blur(keys), blur(values))

    monkeypatch.setattr(CacheView, "read_back", read_back)


def read_source(spec: ModelSpec, x: Tensor, source: int, precision: Precision) -> Tensor:
    """Keys or values [sequences, heads, tokens, D] with those of one source as they are read in a precision."""
    at, changed = spec.segments[source], x.clone()
    part = slice(at.start, at.end)
    stored = blur(x) if precision.bits < 16 else x
    for sequence in range(len(x)):
        twin = sequence % (len(x) // 2) if precision.shared else sequence
        changed[sequence, :, part] = stored[twin, :, part]
    return changed


@pytest.mark.usefixtures("blurring")
@pytest.mark.parametrize(("spec", "recent"), [(FEW_SCALES, 8), (FEW_ROWS, 1)], ids=["scales", "rows"])
@pytest.mark.parametrize("projected", [True, False])
def test_noise_is_that_of_attention_over_changed_keys_and_values(
    spec: ModelSpec, recent: int, projected: bool
) -> None:
    weights = projections(spec)
    observer = PrecisionError(queries=3, recent=recent, menu=MENU)
    projection = weights.__getitem__ if projected else None
    inputs = tokens_of(spec, 4, groups=FOLD)
    run(open_cache(observer, spec, projection=projection), inputs)
    found = observer.average()["noise"]
    expected = torch.zeros_like(found)
    for at, sources in zip(spec.segments[1:], list_sources(spec, recent)[1:], strict=True):
        for layer in range(spec.layers):
            k, v = (torch.cat([inputs[i][layer][n] for i in range(at.index + 1)], 2).double() for n in (1, 2))
            for source in sources:
                for number, precision in enumerate(MENU):
                    read = (read_source(spec, x, source, precision) for x in (k, v))
                    apart = attended(spec, layer, at.index, *read) - attended(spec, layer, at.index, k, v)
                    if projected:
                        heads = weights[layer].double().unflatten(1, (spec.heads * FOLD, D))
                        apart = torch.einsum("whd,shqd->shqw", heads, apart)
                    of_heads = apart.square().sum(-1).mean((0, 2)).unflatten(0, (spec.heads, FOLD)).sum(-1)
                    expected[layer, :, source, number, at.index] = of_heads
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (found[..., MENU.index(Precision(16)), :] == 0).all()
    assert (found[..., MENU.index(Precision(3)), :] > 0).any()


def attended(spec: ModelSpec, layer: int, segment: int, k: Tensor, v: Tensor) -> Tensor:
    """Attention's output of three queries [sequences, query heads, queries, D] over given keys and values."""
    at = spec.segments[segment]
    count = min(3, at.length)
    chosen = [i * at.length // count for i in range(count)]
    q = tokens_of(spec, 4, groups=FOLD)[segment][layer][0][:, :, chosen].double()
    scores = q @ k.repeat_interleave(FOLD, 1).mT * spec.logit_scale
    if at.causal:
        for row, query in enumerate(chosen):
            scores[:, :, row, at.start + query + 1 :] = -torch.inf
    return scores.softmax(-1) @ v.repeat_interleave(FOLD, 1)
