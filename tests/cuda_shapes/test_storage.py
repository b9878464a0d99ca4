"""Storage in few bits on a GPU that is not there: codes, scales and tables that kernels are given.

Slot positions need data: a CPU computes them first, on heads of few channels.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.core.storage import StorageConfig
from kvbench.engine import cache as cache_module
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing, wants_codebooks
from kvbench.engine.packed import storage as packed
from kvbench.engine.schedule import build_schedule
from kvbench.methods.full import Full
from tests.support.engine import prepared
from tests.support.fake_device import CUDA, faked

SPEC = ModelSpec("infinity_2b", 2, 16, 128, next_scale([(side, side) for side in (1, 2, 4, 6, 8, 12)]))
CODEBOOKS = StorageConfig("codebook", "codebook", before_rotation=True)


def attend(cache: KVCache, device: torch.device | str, dtype: torch.dtype) -> None:
    spec = cache.spec
    cache.reset(2)
    for segment in spec.segments:
        cache.begin(segment)
        for layer in range(spec.layers):
            shape = (3, 2, spec.heads, segment.length, spec.head_dim)
            q, k, v = torch.zeros(shape, dtype=dtype, device=device)
            out = cache.attend(layer, q, k, v)
            assert (out.shape, out.dtype, out.device) == (q.shape, dtype, torch.device(device))


def make_cache(spec: ModelSpec, packing: Packing, device: torch.device | str, dtype: torch.dtype) -> KVCache:
    codebooks, rotation = None, None
    if wants_codebooks(packing, Full()):
        codebooks = Codebooks(before_rotation=True).make_random_artifact(spec).tensors
        rotation = torch.zeros(spec.segments[-1].end, spec.head_dim // 2, dtype=torch.complex64)
    placed = {"device": device, "codebooks": codebooks, "rotation": rotation}
    return KVCache(spec, prepared(Full(), spec), dtype=dtype, packing=packing, **placed)


@pytest.mark.parametrize(
    "packing",
    [
        Packing(4, StorageConfig()),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                Packing(8, StorageConfig("token")), Packing(2, StorageConfig(residual=4)),
                Packing(3, CODEBOOKS), Packing(8, StorageConfig(), fp8=True),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_codes_lie_on_a_gpu(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    small, placed = replace(SPEC, head_dim=8), list[Any]()
    place = packed.place_slots

    def note(*given: Any) -> Any:
        placed.append(place(*given))
        return placed[-1]

    monkeypatch.setattr(packed, "place_slots", note)
    attend(make_cache(small, packing, "cpu", torch.float32), "cpu", torch.float32)
    assert placed
    known = iter(placed)
    monkeypatch.setattr(packed, "place_slots", lambda *_: faked(next(known)))
    schedule = build_schedule(SPEC, prepared(Full(), SPEC))
    changes: dict[int, Any] = {}  # layers that are alike share one

    def find_changes(*_: object) -> Any:
        return {at: changes.setdefault(id(change), faked(change)) for at, change in schedule.items()}

    monkeypatch.setattr(cache_module, "build_schedule", find_changes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        attend(make_cache(SPEC, packing, CUDA, torch.bfloat16), CUDA, torch.bfloat16)
    assert next(known, None) is None
