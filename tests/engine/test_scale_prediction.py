"""Storage of differences between scales against a slow reference, and what must hold of it whatever the numbers are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment, next_scale
from kvbench.core.storage import CODEBOOKS, PREDICTED_CODEBOOKS, Precision, StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.engine.coding.scale_residuals import ScaleResiduals, interpolate, list_parents
from kvbench.engine.packed.bytes import bound_bytes, predict_bytes
from kvbench.engine.packed.prediction import find_predictable
from kvbench.engine.schedule import build_schedule, sum_tokens
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from tests.engine.test_packed import STEPS, Formed, attend_slowly, make_books, make_rotation
from tests.support.engine import D, Drawn, DrawnPerSequence, open_cache, prepared, run, small, tokens_of
from tests.support.slow_storage import Numbers, SlowStorage, Token

SCALES = small(layers=2, heads=3, sides=(1, 2, 3, 4, 5))
CODES = {
    "channel": StorageConfig("channel", "channel"),
    "token": StorageConfig("token", "token"),
    "codebooks": StorageConfig("codebook", "codebook"),
}


def predicted(how: StorageConfig) -> StorageConfig:
    return replace(how, centroids="scale")


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
        for found, wanted in zip(run(cache, inputs), expected, strict=True):
            wrong = (found - wanted).abs() > 2e-4 + 1e-3 * wanted.abs()
            assert wrong.float().mean() < 0.02
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


MENU = [Precision(bits, shared) for bits, shared in product((16, 8, 4, 3, 2, 1), (False, True))]
FORMED = Packing(16, PREDICTED_CODEBOOKS)


@dataclass
class Slowly(SlowScales):
    """Differences in the precisions that a method chose; factors are 0 where a block is not predicted."""

    def _share(self, at: Segment, prompts: int) -> None:
        """Let an unconditional sequence add its own prediction to the difference that its twin stores."""
        assert self.forms is not None
        for (sequence, head), held in self.tokens.items():
            positions = [p for p in held if at.start <= p < at.end]
            if not positions or sequence < prompts or not self.forms[at.index][head].shared:
                continue
            twin = self.tokens[sequence - prompts, head]
            for p in positions:
                held[p] = replace(twin[p])
            for name in ("keys", "values"):
                if self.factors[name][head, at.index] != 0:
                    apart = self._guess(name, head, at.index, held) - self._guess(name, head, at.index, twin)
                    apart = apart[[p - at.start for p in positions]]
                    if name == "keys" and self.rotation is not None:
                        apart = self._turn(apart, positions, 1)
                    for p, more in zip(positions, apart, strict=True):
                        part = "key" if name == "keys" else "value"
                        setattr(held[p], part, getattr(held[p], part) + more)
            for p in positions:
                twin[p].bytes //= self.spec.branches
                held[p].bytes = twin[p].bytes


def choose_precisions(spec: ModelSpec, seen: Tensor, seed: int) -> list[list[list[Precision]]]:
    """A random precision of each block, predicted where it can be, by layer and segment."""
    random = Random(seed)
    return [
        [
            [
                one._replace(predicted=needs(spec, seen, layer, head, at.index))
                for head, one in enumerate(random.choices(MENU, k=spec.heads))
            ]
            for at in spec.segments[:-1]
        ]
        for layer in range(spec.layers)
    ]


def add_bits(books: dict[str, Tensor]) -> dict[str, Tensor]:
    """Books with codes of one bit: the first and the last of four levels."""
    return books | {name.replace("_2", "_1"): book[..., ::3] for name, book in books.items() if "_2" in name}


@pytest.mark.parametrize("rotated", [False, True])
def test_each_head_predicts_the_blocks_that_a_method_chose(rotated: bool) -> None:
    spec, books = SCALES, add_bits(make_calibration(SCALES))
    for seed in range(3):
        seen, inputs = draw_scales(spec, seed), tokens_of(spec, 4, seed)
        rotation, menu = make_rotation(spec) if rotated else None, choose_precisions(spec, seen, seed)
        slow = {
            layer: Slowly(spec, layer, PREDICTED_CODEBOOKS, 0, False, rotation, books, menu[layer])
            for layer in range(spec.layers)
        }
        for layer, one in slow.items():
            flags = [[p.predicted and p.bits < 16 for p in row] for row in menu[layer]]
            one.factors = {n: books[f"{n}_factor"][layer] * torch.tensor(flags).T for n in ("keys", "values")}
        expected, held = attend_slowly(spec, inputs, seen, slow)
        method = Formed(seen, menu)
        cache = open_cache(method, spec, packing=FORMED, rotation=rotation, books=books)
        for found, wanted in zip(run(cache, inputs), expected, strict=True):
            wrong = (found - wanted).abs() > 2e-4 + 1e-3 * wanted.abs()
            assert wrong.float().mean() < 0.02
        foreseen = sum_tokens(predict_bytes(spec, method, FORMED)[..., None])
        for k, layers in enumerate(held):
            assert cache.ledger.held_bytes[k][-1] == [sum(layer[0] for layer in layers)] == [foreseen[k, -1]]


def test_precisions_with_factors_of_zero_store_the_numbers_themselves() -> None:
    seen, inputs = draw_scales(SCALES, 0), tokens_of(SCALES, 4)
    menu = choose_precisions(SCALES, seen, 0)
    plain = [[[p._replace(predicted=False) for p in row] for row in rows] for rows in menu]
    books = add_bits(make_calibration(SCALES, 0.0))
    found = [
        run(open_cache(Formed(seen, one), SCALES, packing=how, books=books), inputs)
        for one, how in ((menu, FORMED), (plain, Packing(16, CODEBOOKS)))
    ]
    for predicted, wanted in zip(*found, strict=True):
        assert torch.equal(predicted, wanted)


def test_a_predicted_precision_needs_the_scale_before() -> None:
    seen = draw_scales(SCALES, 0)
    menu = [[[Precision(2, predicted=index > 0)] * 3 for index in range(5)] for _ in range(2)]
    cache = open_cache(Formed(seen, menu), SCALES, packing=FORMED, books=make_calibration(SCALES))
    with pytest.raises(ValueError, match=r"head . of layer 0 drops tokens of scale ., which scale . needs"):
        run(cache, tokens_of(SCALES, 2))


@pytest.mark.parametrize("shared", [False, True])
def test_a_calibration_reads_back_what_a_cache_stores(shared: bool) -> None:
    spec, books, rotation = SCALES, make_calibration(SCALES), make_rotation(SCALES)
    inputs = tokens_of(spec, 4)
    read: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    class Reader(ScaleResiduals):
        uses = Uses(codebooks=True, predictions=True)

        def accumulate(self, view: View) -> None:
            index, before = view.segment.index, None
            if view.segment.last:
                return
            if index:
                before = (spec.segments[index - 1], *read[view.layer, index - 1])
            read[view.layer, index] = view.read_back(
                view.keys(), view.values(), view.segment, 3, before=before, shared=shared and index > 1
            )

    run(open_cache(Reader(), spec, rotation=rotation, books=books), inputs)
    menu = [
        [[Precision(3, shared and index > 1, index > 0)] * 3 for index in range(4)]
        for _ in range(spec.layers)
    ]
    cache = open_cache(
        Formed(torch.ones_like(draw_scales(spec, 0)), menu),
        spec,
        packing=FORMED,
        rotation=rotation,
        books=books,
    )
    cache.reset(4)
    for segment, layers in zip(spec.segments[:-1], inputs, strict=False):
        cache.begin(segment)
        for layer, qkv in enumerate(layers):
            cache.attend(layer, *qkv)
    store = cache._stores[1]
    parts = [store.read(some) for some in cache._storage._split(store)]
    for number, name in enumerate(("keys", "values")):
        stored = torch.cat([getattr(part, name) for part in parts]).unflatten(1, (3, -1)).flatten(0, 1)
        expected = torch.cat([read[1, index][number] for index in range(4)], 1)
        assert torch.allclose(stored[:, : expected.shape[1]], expected, atol=2e-3)
