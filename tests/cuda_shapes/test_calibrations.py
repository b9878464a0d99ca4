"""Calibrations of every method on a GPU that is not there."""

from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.support.build import built, composed
from benchmarks.support.fake_gpu import NoNoise
from kvbench.core.segments import Family
from kvbench.engine.cache import KVCache
from kvbench.methods.shared.calibration import Observer
from kvbench.runs.calibrate import Observation
from tests.cuda_shapes.test_next_token import SHORT, unread
from tests.support.fake_device import CUDA
from tests.support.fake_models import loaded
from tests.support.methods import methods_for

__all__ = ["unread"]  # a fixture
COUNTING = ("cake", "lukv", "ssd", "triattention")
"""Methods whose observers read a number of the device."""


def list_observers(family: Family, model: str) -> list[Observer]:
    """What the methods of a family calibrate, each once."""
    found: dict[str, Observer] = {}
    for name in methods_for(family):
        needs = built(composed([f"method={name}", f"model={model}"])["method"]).needs()
        if isinstance(needs, Observer) and name not in COUNTING:
            found.setdefault(repr(needs), needs)
    return list(found.values())


def watch(model: Any, observers: list[Observer]) -> None:
    for observer in observers:
        observer.prepare(model.spec)
    cache = KVCache(
        model.spec, Observation(observers, model.spec), dtype=model.compute_dtype(CUDA), device=CUDA,
        projection=model.output_projection, rotation=model.key_rotation(),
    )  # fmt: skip
    model.generate(["1 a", "2 b"], cache, NoNoise(2))


@pytest.mark.slow
@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize(("family", "name"), [("next-scale", "infinity_2b"), ("next-token", "qwen3_8b")])
def test_observers_look_at_a_gpu(family: Family, name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        watch(loaded(name, *SHORT.get(name, ())), list_observers(family, name))
