"""Calibration of PriceKV by blocks: errors of sets of past blocks by masked attention, and of their precisions."""

from dataclasses import replace
from itertools import product

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
from tests.support.layer_outputs import FOLD, SCALES, Inputs, attention, project, projections

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


def read_source(inputs: Inputs, source: int, precision: Precision) -> Inputs:
    """Inputs whose keys and values of one source are as they are read in a precision."""

    def read(x: Tensor) -> Tensor:
        stored = blur(x) if precision.bits < 16 else x
        return stored[: len(x) // 2].repeat(2, 1, 1, 1) if precision.shared else stored

    changed = [(q, read(k), read(v)) for q, k, v in inputs[source]]
    return [*inputs[:source], changed, *inputs[source + 1 :]]


@pytest.mark.usefixtures("blurring")
@pytest.mark.parametrize(("spec", "recent"), [(FEW_SCALES, 8), (FEW_ROWS, 1)], ids=["scales", "rows"])
@pytest.mark.parametrize("projected", [True, False])
def test_noise_is_that_of_attention_over_changed_keys_and_values(
    spec: ModelSpec, recent: int, projected: bool
) -> None:
    observer = PrecisionError(queries=3, recent=recent, menu=MENU)
    projection = projections(spec).__getitem__ if projected else None
    inputs = tokens_of(spec, 4, groups=FOLD)
    run(open_cache(observer, spec, projection=projection), inputs)
    found = observer.average()["noise"]
    expected = torch.zeros_like(found)
    for at, sources in zip(spec.segments[1:], list_sources(spec, recent)[1:], strict=True):
        count = min(3, at.length)
        asking = [i * at.length // count for i in range(count)]
        for layer, source, (number, precision) in product(range(spec.layers), sources, enumerate(MENU)):
            changed = attention(spec, read_source(inputs, source, precision), layer, at.index)
            whole = attention(spec, inputs, layer, at.index)
            for (_, head, p, v), (_, _, p_whole, v_whole) in zip(changed, whole, strict=True):
                apart = p[:, asking] @ v - p_whole[:, asking] @ v_whole
                apart = project(apart, spec, layer, head) if projected else apart
                expected[layer, head, source, number, at.index] += apart.square().sum(-1).mean(1).sum() / 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (found[..., MENU.index(Precision(16)), :] == 0).all()
    assert (found[..., MENU.index(Precision(3)), :] > 0).any()
