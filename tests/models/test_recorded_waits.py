"""Host reads and host copies of recorded work on a simulated GPU: there are none."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks.support.build import built, composed
from benchmarks.support.device_watch import DeviceWatch, list_tensors
from tests.support.marks import slow_except
from tests.support.methods import methods_for

QUICK = ("snapkv",)
RECORDED = [
    name
    for name in methods_for("next-scale")
    if built(composed([f"method={name}"])["method"]).graph_obstacle is None
]
SHALLOW = ("model.pixels=0.06M", "model.transformer.depth=2", "model.transformer.block_chunks=1")


class Strict(DeviceWatch):
    """Refuses what a capture refuses."""

    def note_read(self, number: Tensor) -> None:
        """A number is read on the host."""
        raise AssertionError("a number is read on the host")

    def note_operation(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Tensors of the host that have dimensions are copied, whatever the operation."""
        tensors = [tensor for tensor in list_tensors((args, kwargs)) + results if tensor.dim()]
        assert len({tensor.device.type for tensor in tensors}) < 2, func


@pytest.mark.parametrize("name", slow_except(QUICK.__contains__, RECORDED))
def test_a_recording_waits_for_nothing(name: str) -> None:
    pytest.importorskip("triton")
    fake_gpu = importlib.import_module("benchmarks.support.fake_gpu")

    class Checked(fake_gpu.CountedReplays):
        def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
            with Strict():
                return super().__call__(work)

    budget = "1" if name == "full" else "0.3"
    model, method = fake_gpu.prepare(["model=infinity_2b", f"method={name}", f"budget={budget}", *SHALLOW])
    record = Checked()
    fake_gpu.run(model, method, 2, DeviceWatch(), before=2, record=record)
    assert record.replays == len(model.spec.segments)
