"""Generations of next-scale models on a GPU that is not there: do devices mix, must the host wait?

Triton kernels are replaced by checks of what they are given. Real sizes but two layers.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.support.fake_gpu import NoNoise
from kvbench.engine import cache as cache_module
from kvbench.engine.cache import KVCache
from kvbench.engine.schedule import build_schedule
from kvbench.methods.shared.base import Method
from tests.support.fake_device import CUDA, faked
from tests.support.fake_models import loaded, prepared
from tests.support.methods import mark_by_kind, methods_for

MODELS = ("infinity_2b", "infinity_8b", "var_d30", "var_d36")


def generated(model: Any, method: Method) -> None:
    cache = KVCache(model.spec, method, dtype=model.compute_dtype(CUDA), device=CUDA)
    images = model.generate(["1 a", "2 b"], cache, NoNoise(2))
    assert (images.shape[0], images.dtype, images.device.type) == (2, torch.uint8, "cpu")


def know_schedule(model: Any, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static method's schedule is worked out before, from numbers."""
    schedule = build_schedule(model.spec, method)
    monkeypatch.setattr(
        cache_module, "build_schedule", lambda *_: {at: faked(change) for at, change in schedule.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "heatkv"])
@pytest.mark.parametrize("name", MODELS)
def test_a_generation_waits_for_nothing_but_its_checks(
    name: str, method: str, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = loaded(name)
    chosen = prepared(method, model)
    know_schedule(model, chosen, monkeypatch)
    with mode:
        generated(model, chosen)
    assert gpu == {"text": int(name.startswith("infinity")), "finite": 1}


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", mark_by_kind(methods_for("next-scale"), "snapkv"))
def test_methods_look_at_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = loaded("infinity_2b", "model.pixels=0.06M")
    chosen = prepared(name, model)
    monkeypatch.setattr(chosen, "strict", False)
    with mode:
        generated(model, chosen)
