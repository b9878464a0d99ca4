"""The planner's bytes against recorded generations, and the largest batch against a search one by one."""

import importlib
import weakref
from collections.abc import Sequence

import pytest
from torch import Tensor

from benchmarks.support.device_watch import DeviceWatch
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.schedule import predict_ring_slots, predict_row_lengths
from kvbench.methods.full import Full
from kvbench.plan import count_ring_bytes, find_largest_batch

SHALLOW = ("model.transformer.depth=2", "model.transformer.block_chunks=1")
GIB = 2**30
BLOCK = 512
"""torch's allocator rounds sizes up to multiples of these bytes."""


class PeakWatch(DeviceWatch):
    """Counts the bytes of a device that operations allocate; earlier memory, such as weights, is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.peak = 0
        self._known: set[int] = set()

    def note_inputs(self, tensors: list[Tensor]) -> None:
        self._meet(tensors, allocated=False)

    def note_operation(self, func: object, args: object, kwargs: object, results: list[Tensor]) -> None:
        self._meet(results, allocated=True)

    def _meet(self, tensors: list[Tensor], *, allocated: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cuda" and storage._cdata not in self._known:
                size = -(-storage.nbytes() // BLOCK) * BLOCK if allocated else 0
                self._known.add(storage._cdata)  # until it is freed: another storage may reuse the address
                weakref.finalize(storage, self._forget, storage._cdata, size).atexit = False
                self.used += size
                self.peak = max(self.peak, self.used)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.used -= size


def peak_and_plan(overrides: Sequence[str], batch: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes that a recorded generation has in use at most, and those that are planned for it."""
    fake_gpu = importlib.import_module("benchmarks.support.fake_gpu")
    for kind in ("infinity", "var"):  # what is reserved is what is planned: the work itself counts here
        monkeypatch.setattr(f"kvbench.models.{kind}.loop.reserve", lambda *_: None)
    model, method = fake_gpu.prepare(overrides)
    watch = PeakWatch()
    fake_gpu.run(model, method, batch, watch)
    lengths = predict_row_lengths(model.spec, method)
    assert lengths is not None
    activations = model.activation_bytes(batch)
    planned = count_ring_bytes(model.spec, lengths, batch) + activations
    return watch.peak, max(planned, model.decoding_bytes(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "overrides"),
    [
        (16, ("model=infinity_2b", "method=full", *SHALLOW)),
        (16, ("model=infinity_2b", "method=snapkv", "budget=0.04", *SHALLOW)),
        (2, ("model=infinity_2b", "method=full", "model.pixels=0.60M", *SHALLOW)),
        (64, ("model=var_d30", "method=full", "model.transformer.depth=2")),
    ],
    ids=["static", "dynamic", "decoder", "codes"],
)
def test_a_generation_holds_what_is_planned(
    batch: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    peak, planned = peak_and_plan(overrides, batch, monkeypatch)
    assert peak == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(("branches", "itemsize"), [(1, 2), (2, 4)])
def test_bytes_of_a_generation_by_hand(branches: int, itemsize: int) -> None:
    """Two layers of three heads of 8 channels hold 1, then 5 tokens; the last of three scales has 9."""
    spec = ModelSpec("small", 2, 3, 8, next_scale([(1, 1), (2, 2), (3, 3)]), branches=branches)
    lengths = predict_row_lengths(spec, Full())
    assert lengths is not None
    ring = predict_ring_slots(spec, lengths)
    assert ring >= 2 * 2 * 3 * 5  # at least keys and values of all that is cached
    assert count_ring_bytes(spec, lengths, 4, itemsize) == 4 * branches * ring * 8 * itemsize


@pytest.mark.parametrize("gpu_gib", [1, 8, 141])
@pytest.mark.parametrize("name", ["infinity_2b", "var_d30"])
def test_the_largest_batch_still_fits(name: str, gpu_gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (f"model={name}", "method=streaming_llm", "budget=0.1", "sinks=1")
    model, method = importlib.import_module("benchmarks.support.fake_gpu").prepare(overrides)
    lengths = predict_row_lengths(model.spec, method)
    assert lengths is not None

    def total(batch: int) -> int:
        activations = model.activation_bytes(batch)
        needed = count_ring_bytes(model.spec, lengths, batch) + activations
        return 2 * model.parameters + max(needed, model.decoding_bytes(batch))

    largest = find_largest_batch(model, lengths, gpu_gib)
    assert largest == 0 or total(largest) <= gpu_gib * GIB
    assert total(largest + 1) > gpu_gib * GIB
