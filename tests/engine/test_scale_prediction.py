"""Storage of differences between scales against a slow reference, and what must hold of it whatever the numbers are."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.core.storage import StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.engine.coding.scale_residuals import ScaleResiduals, interpolate, list_parents
from kvbench.engine.packed.bytes import bound_bytes, predict_bytes
from kvbench.engine.packed.prediction import find_predictable
from kvbench.engine.schedule import build_schedule, sum_tokens
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from tests.engine.test_packed import STEPS
from tests.support.engine import D, Drawn, DrawnPerSequence, open_cache, prepared, run, tokens_of
from tests.support.slow_attention import attend_slowly, check_attention, make_books, make_rotation
from tests.support.slow_scales import SCALES, SlowScales, draw_scales, make_calibration, needs

CODES = {
    "channel": StorageConfig("channel", "channel"),
    "token": StorageConfig("token", "token"),
    "codebooks": StorageConfig("codebook", "codebook"),
}


def predicted(how: StorageConfig) -> StorageConfig:
    return replace(how, centroids="scale")


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("bits", [2, 4])
def test_attention_and_bytes_are_those_of_slow_storage(bits: int, codes: str, rotated: bool) -> None:
    spec, how = SCALES, predicted(CODES[codes])
    for seed in range(3):
        seen, inputs = draw_scales(spec, seed), tokens_of(spec, 2, seed)
        if not seed:
            seen[:] = True  # the full cache
        rotation, books = make_rotation(spec) if rotated else None, make_calibration(spec)
        slow = {
            layer: SlowScales(spec, layer, how, bits, False, rotation, books) for layer in range(spec.layers)
        }
        for layer, one in slow.items():
            allowed = [
                [needs(spec, seen, layer, h, k) for k in range(len(spec.segments) - 1)]
                for h in range(spec.heads)
            ]
            one.factors = {n: books[f"{n}_factor"][layer] * torch.tensor(allowed) for n in ("keys", "values")}
        expected, held = attend_slowly(spec, inputs, seen, slow)
        method, packing = Drawn(seen), Packing(bits, how)
        cache = open_cache(method, spec, packing=packing, rotation=rotation, books=books)
        check_attention(run(cache, inputs), expected)
        foreseen = sum_tokens(predict_bytes(spec, method, packing)[..., None])
        for k, layers in enumerate(held):
            total = sum(layer[0] for layer in layers)
            assert cache.ledger.held_bytes[k][-1] == [total] == [foreseen[k, -1]]
            for a, b in bound_bytes(spec, packing):
                assert total <= a * max(cache.ledger.tokens_after[k]) + b


@pytest.mark.parametrize("codes", CODES)
def test_factors_of_zero_store_the_numbers_themselves(codes: str) -> None:
    inputs, shared = tokens_of(SCALES, 2), {"rotation": make_rotation(SCALES)}
    plain = open_cache(Full(), SCALES, packing=Packing(3, CODES[codes]), books=make_books(SCALES), **shared)
    books = make_calibration(SCALES, 0.0)
    books |= {f"{name}_residual": book for name, book in make_books(SCALES).items()}
    cache = open_cache(Full(), SCALES, packing=Packing(3, predicted(CODES[codes])), books=books, **shared)
    for found, wanted in zip(run(cache, inputs), run(plain, inputs), strict=True):
        assert torch.equal(found, wanted)
    assert cache.ledger.held_bytes == plain.ledger.held_bytes


def store_scales(
    cache: KVCache, spec: ModelSpec, inputs: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer and head as the last segment reads them, [tokens, D]."""
    cache.reset(1)
    for segment, (k, v) in zip(spec.segments, inputs, strict=False):
        cache.begin(segment)
        cache.attend(0, k, k, v)
    store = cache._stores[0]
    return store.keys[0], store.values[0]


@pytest.mark.parametrize("rotated", [False, True])
def test_a_scale_that_equals_its_prediction_has_no_error(rotated: bool) -> None:
    spec = ModelSpec("two", 1, 1, D, next_scale([(2, 3), (3, 5), (6, 6)]))
    rotation, books = make_rotation(spec) if rotated else None, make_calibration(spec, -0.7)
    packing = Packing(2, predicted(CODES["channel"]))
    first = [torch.randn(1, 1, 6, D, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    cache = open_cache(Full(), spec, packing=packing, rotation=rotation, books=books)
    read = store_scales(cache, spec, [(first[0], first[1])])
    assert (read[1] - first[1][0, 0]).abs().max() > 0.05  # the first scale has an error
    grown = []
    for number, x in enumerate(read):
        turned = rotation is not None and number == 0
        pairs = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) if turned else x
        maps = pairs * rotation[:6].conj() if turned else pairs
        maps = torch.view_as_real(maps).flatten(1) if turned else maps
        wide = F.interpolate(maps.T.reshape(1, D, 2, 3), (3, 5), mode="bilinear").flatten(2)[0].T * -0.7
        if turned:
            wide = torch.view_as_complex(wide.unflatten(1, (-1, 2)).contiguous()) * rotation[6:21]
            wide = torch.view_as_real(wide).flatten(1)
        grown.append(wide[None, None])
    keys, values = store_scales(cache, spec, [(first[0], first[1]), (grown[0], grown[1])])
    assert torch.allclose(keys[6:], grown[0][0, 0], atol=1e-5)
    assert torch.allclose(values[6:], grown[1][0, 0], atol=1e-5)


def test_the_order_of_heads_changes_nothing() -> None:
    inputs, books, order = tokens_of(SCALES, 2), make_calibration(SCALES), torch.tensor([2, 0, 1])
    moved = [[tuple(x[:, order] for x in qkv) for qkv in layers] for layers in inputs]
    packing = Packing(2, predicted(CODES["codebooks"]))
    first = open_cache(Full(), SCALES, packing=packing, books=books)
    other = open_cache(Full(), SCALES, packing=packing, books={n: b[:, order] for n, b in books.items()})
    for found, wanted in zip(run(other, moved), run(first, inputs), strict=True):
        assert torch.equal(found, wanted[:, order])


@pytest.mark.parametrize("seed", range(4))
def test_only_scales_whose_parents_stay_are_predicted(seed: int) -> None:
    seen = draw_scales(SCALES, seed)
    schedule = build_schedule(SCALES, prepared(Drawn(seen), SCALES), find_free_slots=lambda _: 0)
    found, count = find_predictable(SCALES, schedule), len(SCALES.segments) - 1
    for layer, head, index in product(range(SCALES.layers), range(SCALES.heads), range(count)):
        assert bool(found[layer, head, index]) == needs(SCALES, seen, layer, head, index)
    assert found.any()
    assert not found[:, :, 1:].all()


def test_a_dropped_scale_that_another_needs_is_refused() -> None:
    packing = Packing(2, predicted(CODES["channel"]))
    cache = open_cache(Full(), SCALES, packing=packing, books=make_calibration(SCALES, 1.0))
    cache.reset(2)
    store = cache._stores[0]  # without a token
    with pytest.raises(ValueError, match="dropped tokens of scale 2, which scale 3 needs"):
        cache._storage._predictor.predict(0, 3, store.layout, *store.read_unrotated(range(2)))


@pytest.mark.parametrize(
    ("method", "spec", "told"),
    [
        (DrawnPerSequence(draw_scales(SCALES, 0)), SCALES, "a method that reads data"),
        (Full(), STEPS, "has no scales"),
    ],
)
def test_what_cannot_be_predicted_is_refused(method: Method, spec: ModelSpec, told: str) -> None:
    with pytest.raises(ValueError, match=f"storage.centroids=scale: .*{told}"):
        open_cache(
            method, spec, packing=Packing(2, predicted(CODES["channel"])), books=make_calibration(spec)
        )


@pytest.mark.parametrize(
    "sizes", [((2, 2), (3, 3)), ((3, 5), (4, 7)), ((5, 3), (6, 3)), ((1, 1), (2, 4)), ((4, 4), (4, 4))]
)
def test_scales_are_interpolated_as_torch_does(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    before, segment = next_scale([*sizes, (9, 9)])[:2]
    x = torch.randn(2, before.length, D, generator=torch.Generator().manual_seed(0))
    parents, weights = list_parents(before, segment)
    wide = F.interpolate(x.mT.unflatten(2, sizes[0]), sizes[1], mode="bilinear", align_corners=False)
    assert torch.allclose(interpolate(x, parents, weights), wide.flatten(2).mT, atol=1e-6)


@pytest.mark.parametrize("rotated", [False, True])
def test_factors_and_energies_are_of_least_squares(rotated: bool) -> None:
    """Scales that follow the one before in one head and are noise in the others, against numpy's least squares."""
    spec, inputs = SCALES, tokens_of(SCALES, 4, 1)
    rotation = make_rotation(spec) if rotated else None
    exact: list[list[Tensor]] = [[], []]  # keys before rotation, and values, of layer 1
    for segment, layers in zip(spec.segments[:-1], inputs, strict=False):
        q, k, v = layers[1]
        for number, x in enumerate((k, v)):
            if segment.index > 1:
                before = spec.segments[segment.index - 1]
                maps = exact[number][-1][:, 0].mT.unflatten(2, (before.height, before.width))
                wide = F.interpolate(maps, (segment.height, segment.width), mode="bilinear").flatten(2).mT
                x[:, 0] = 0.5 * wide + 0.05 * x[:, 0] + 3
            exact[number].append(x.clone())
        if rotation is not None:
            pairs = torch.view_as_complex(k.unflatten(3, (-1, 2)).contiguous())
            k = torch.view_as_real(pairs * rotation[segment.start : segment.end]).flatten(3)
        layers[1] = (q, k, v)
    observer = ScaleResiduals()
    run(open_cache(observer, spec, rotation=rotation), inputs)
    found = observer.average()
    for number, side in enumerate(("keys", "values")):
        for head, index in product(range(spec.heads), range(1, 4)):
            own, before = (exact[number][i][:, head].double() for i in (index, index - 1))
            sizes = [(spec.segments[i].height, spec.segments[i].width) for i in (index - 1, index)]
            wide = F.interpolate(before.mT.unflatten(2, sizes[0]), sizes[1], mode="bilinear").flatten(2).mT
            x, guess = ((part - part.mean(1, keepdim=True)).flatten().numpy() for part in (own, wide))
            plain, left = float(x @ x), float(x @ x)
            slope = 0.0
            if index > 1:
                (slope,), (left,), *_ = np.linalg.lstsq(guess[:, None], x, rcond=None)
            place = (1, head, index)
            assert float(found[f"{side}_plain"][place]) == pytest.approx(plain / 2, rel=1e-4)
            assert float(found[f"{side}_predicted"][place]) == pytest.approx(left / 2, rel=1e-3)
            assert float(found[f"{side}_energy"][place]) == pytest.approx(
                float(own.square().sum()) / 2, rel=1e-4
            )
            wanted = slope if left < 0.7 * plain else 0
            assert float(found[f"{side}_factor"][place]) == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        assert (found[f"{side}_factor"][1, 0, 2:] != 0).all()
        assert (found[f"{side}_factor"][0] == 0).all()
        span = [found[f"{side}_2{end}"][1, 0, 3].float().diff(dim=-1).mean() for end in ("", "_residual")]
        assert span[1] < span[0] / 3
        unpredicted = found[f"{side}_2"][0], found[f"{side}_2_residual"][0]
        assert torch.equal(*unpredicted)
