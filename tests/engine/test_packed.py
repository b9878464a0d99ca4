"""A cache in few bits against storage that quantises one token after the other, and dense attention over that."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest
import torch

from kvbench.core.segments import ModelSpec, Segment, next_token
from kvbench.core.storage import CODEBOOKS, StorageConfig
from kvbench.engine.coding.formats import Packing
from kvbench.engine.packed.bytes import bound_bytes, predict_bytes
from kvbench.engine.schedule import sum_tokens
from kvbench.methods.full import Full
from kvbench.methods.shared.precision import Precision
from kvbench.methods.shared.uses import Uses
from tests.support.engine import D, Drawn, DrawnPerSequence, draw_seen, open_cache, run, small, tokens_of
from tests.support.slow_storage import (
    SlowStorage,
    attend_slowly,
    check_attention,
    make_codebooks,
    make_rotation,
)
from tests.support.steps import draw, generate

SCALES = small(layers=2, heads=2, sides=(1, 2, 3, 4))
STEPS = ModelSpec("steps", 2, 2, D, next_token(5, [4, 4, 4, 4]))
STORAGES = {
    "channel": StorageConfig(),
    "token": StorageConfig("token"),
    "values by channel": StorageConfig("channel", "channel"),
    "kivi": StorageConfig(group=3, residual=6, before_rotation=False),
    "waiting": StorageConfig(residual=5),
    "codebooks": StorageConfig("codebook", "codebook"),
    "rotated": StorageConfig("rotated", "rotated", before_rotation=False, key_bits=4, value_bits=2),
    "rotated values": StorageConfig("channel", "rotated", value_bits=3),
    "rotated keys": StorageConfig("rotated", "token", residual=5, before_rotation=False, key_bits=3),
}
DTYPES = {"int8": (8, False), "int4": (4, False), "int3": (3, False), "int2": (2, False), "fp8": (8, True)}


ROTATED = {"no layer": (), "all layers": (0, 1), "one layer": (0,)}
KINDS = (Drawn, DrawnPerSequence)
CASES = [
    (dtype, storage, [*ROTATED][(i + j) % 3], (SCALES, STEPS)[(i + j // 3) % 2], KINDS[(i // 2 + j) % 2])
    for i, dtype in enumerate(DTYPES)
    for j, storage in enumerate(STORAGES)
]
"""Each pair of values of two columns occurs."""


@pytest.mark.parametrize(("dtype", "storage", "layers", "given", "kind"), CASES)
def test_attention_and_bytes_are_those_of_slow_storage(
    dtype: str, storage: str, layers: str, given: ModelSpec, kind: type[Drawn]
) -> None:
    (bits, fp8), how, rotated = DTYPES[dtype], STORAGES[storage], ROTATED[layers]
    spec = replace(given, unrotated=(1,) if rotated == (0,) else ())
    seen, inputs = draw_seen(spec, 3, 0.8), tokens_of(spec, 2)
    rotation, codebooks = make_rotation(spec) if rotated else None, make_codebooks(spec)
    slow = {
        layer: SlowStorage(spec, layer, how, bits, fp8, rotation if layer in rotated else None, codebooks)
        for layer in range(spec.layers)
    }
    expected, held, reads = attend_slowly(spec, inputs, seen, slow)
    cache = open_cache(
        kind(seen), spec, packing=Packing(bits, how, fp8), rotation=rotation, codebooks=codebooks
    )
    check_attention(run(cache, inputs), expected)
    for k, row in enumerate(held):
        total = [sum(layer[s] for layer in row) for s in range(2)]
        assert cache.ledger.held_bytes[k][-1] in (total, [total[0]])
        assert max(total) <= cache.ledger.sequence_bytes
    assert [cache.ledger.reads.count([s]) for s in range(2)] == reads


@dataclass
class Formed(Drawn):
    """Keeps what a table says, in forms that differ by segment, head and layer."""

    menu: Sequence[Sequence[Sequence[Precision]]] = ()

    uses = Uses(precisions=True)

    def precisions(self, layer: int, at: Segment) -> Sequence[Precision]:
        return self.menu[layer][at.index]


@pytest.mark.parametrize("rotated", [False, True])
def test_each_head_has_the_forms_that_a_method_chose(rotated: bool) -> None:
    spec = small(layers=3, heads=3, sides=(1, 2, 3, 4))
    choices = [Precision(bits, shared) for bits, shared in product((16, 8, 4, 3, 2), (False, True))]
    random = Random(1)
    menu = [[random.choices(choices, k=spec.heads) for _ in spec.segments] for _ in range(spec.layers)]
    rotation, codebooks = make_rotation(spec) if rotated else None, make_codebooks(spec)
    seen, inputs = draw_seen(spec, 3, 0.8), tokens_of(spec, 4)
    slow = {
        layer: SlowStorage(spec, layer, CODEBOOKS, 0, False, rotation, codebooks, menu[layer])
        for layer in range(spec.layers)
    }
    expected, held, reads = attend_slowly(spec, inputs, seen, slow)
    method, packing = Formed(seen, menu), Packing(16, CODEBOOKS)
    cache = open_cache(method, spec, packing=packing, rotation=rotation, codebooks=codebooks)
    check_attention(run(cache, inputs), expected)
    foreseen = sum_tokens(predict_bytes(spec, method, packing)[..., None])
    for k, layers in enumerate(held):
        total = [sum(layer[s] for layer in layers) for s in range(4)]
        assert cache.ledger.held_bytes[k][-1] == [total[0]] == [foreseen[k, -1]]
        assert len(set(total)) == 1
    assert {cache.ledger.reads.count([0]), predict_bytes(spec, method, packing, rotates=rotated).sum()} == {
        *reads
    }


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", ["int4", "int2", "fp8"])
def test_bytes_are_known_beforehand_and_bounded(dtype: str, storage: str) -> None:
    bits, fp8 = DTYPES[dtype]
    packing = Packing(bits, STORAGES[storage], fp8)
    for spec in (SCALES, STEPS):
        for share in (0.3, 1.0):
            method = Drawn(draw_seen(spec, 2, share))
            cache = open_cache(method, spec, packing=packing, codebooks=make_codebooks(spec))
            run(cache, tokens_of(spec, 2))
            found = [[layer[0] for layer in row] for row in cache.ledger.held_bytes]
            assert sum_tokens(predict_bytes(spec, method, packing)[..., None]).tolist() == found
            for tokens, stored in zip(cache.ledger.tokens_after, found, strict=True):
                for a, b in bound_bytes(spec, packing):
                    assert max(stored) <= a * max(tokens) + b


@pytest.mark.parametrize("fp8", [False, True])
def test_exempt_layers_store_sixteen_bits(fp8: bool) -> None:
    spec = small(layers=4, heads=2, sides=(1, 2, 3))
    inputs = tokens_of(spec, 2)
    exempt = Packing(8 if fp8 else 2, StorageConfig(exempt=1), fp8)
    found, held = [], []
    for packing in (Packing(16, StorageConfig()), exempt, replace(exempt, storage=StorageConfig())):
        cache = open_cache(Full(), spec, packing=packing)
        found.append(run(cache, inputs))
        held.append(cache.ledger.sequence_bytes)
    for number, (half, mixed, coded) in enumerate(zip(*found, strict=True)):
        assert torch.equal(mixed, half if number % 4 in (0, 3) else coded)
    assert held[0] > held[1] == (held[0] + held[2]) / 2


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
def test_a_padded_prompt_is_stored_as_it_is_alone(kind: type[Drawn]) -> None:
    inputs, padding = draw(STEPS, 2), [0, 2]
    options = {"packing": Packing(4, StorageConfig()), "rotation": make_rotation(STEPS)}
    cache = open_cache(kind(draw_seen(STEPS, 4, 0.8)), STEPS, **options)
    together = generate(cache, inputs, padding)
    for sequence, behind in enumerate(padding):
        alone = generate(cache, [tuple(x[[sequence]] for x in qkv) for qkv in inputs], [behind])
        for whole, one in zip(together, alone, strict=True):
            assert torch.allclose(whole[sequence, :, behind:], one[0, :, behind:], atol=1e-5)
