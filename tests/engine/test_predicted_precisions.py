"""Precisions that a method chooses for each block, predicted from the scale before or not, against a slow reference."""

from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import CODEBOOKS, PREDICTED_CODEBOOKS, Precision
from kvbench.engine.coding.formats import Packing
from kvbench.engine.coding.scale_residuals import ScaleResiduals
from kvbench.engine.packed.bytes import predict_bytes
from kvbench.engine.schedule import sum_tokens
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from tests.engine.test_packed import Formed
from tests.support.engine import open_cache, run, tokens_of
from tests.support.slow_attention import attend_slowly, check_attention, make_rotation
from tests.support.slow_scales import SCALES, SlowScales, draw_scales, make_calibration, needs

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
        check_attention(run(cache, inputs), expected)
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
