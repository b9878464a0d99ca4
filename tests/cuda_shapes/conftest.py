"""A GPU that is not there: kernels check what they are given, and nothing waits."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine import padding, schedule
from kvbench.kernels.layout import Layout, arrange_rows
from kvbench.models.base import FiniteCheck, TextFeatures
from tests.support.fake_device import CUDA, Device

pytest.importorskip("triton")

from benchmarks.support.triton_launches import replace_launches
from tests.support.fake_kernels import check, check_storage


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Stands in for what needs numbers; how often each waits for the device."""
    check_storage(monkeypatch)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Device())
    waits = {"text": 0, "finite": 0}

    def pad(text: TextFeatures, words: int) -> tuple[Tensor, Tensor]:
        waits["text"] += 1
        values = text.values.new_zeros(len(text.lengths), words, text.values.shape[1])
        return values, torch.empty(values.shape[:2], dtype=torch.bool, device=CUDA)

    def conclude(finite: FiniteCheck) -> None:
        assert {(maximum.device, maximum.shape[1:]) for maximum in finite._maxima} == {(CUDA, (1,))}
        waits["finite"] += 1

    monkeypatch.setattr(TextFeatures, "pad", pad)
    monkeypatch.setattr(FiniteCheck, "conclude", conclude)
    monkeypatch.setattr(Tensor, "pin_memory", lambda numbers: numbers)
    monkeypatch.setattr(
        "kvbench.models.noise.MIN_THREADED", 1 << 62
    )  # a second thread has tensors with numbers
    with replace_launches(check):
        yield waits


def keeping_all(
    layout: Layout,
    keep: Tensor | None,
    positions: Tensor,
    length: int,
    free_slots: int,
    counts: Sequence[int] | None = None,
) -> tuple[Layout, Tensor]:
    """In place of the real plan, which counts on the host what is kept."""
    rows = len(layout.counts)
    assert keep is None or (keep.shape, keep.dtype) == ((rows, layout.longest + length), torch.bool)
    assert keep is None or keep.device == CUDA
    counts = [layout.longest + length] * rows if counts is None else [*counts]
    positions = torch.empty(rows, max(counts), dtype=torch.int64, device=CUDA)
    after = arrange_rows(positions, counts, free_slots)
    return after, torch.empty(after.capacity, dtype=torch.int32, device=CUDA)


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to what methods that look at data ask of values: everything is kept, `if x.any():` is not taken.

    Tensors made from values hold none: a fake tensor of one value keeps it, and copies it to the device for real.
    """
    for module in (schedule, padding):
        monkeypatch.setattr(module, "source_table", keeping_all)
    monkeypatch.setattr(schedule, "are_equal", lambda *_: False)
    find_any, as_bool = Tensor.any, Tensor.__bool__
    answers: dict[int, Tensor] = {}  # holds them, so that no later tensor has an id of theirs

    def noted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        found = find_any(x, *args, **options)
        return answers.setdefault(id(found), found)

    make = torch.tensor

    def make_empty(data: Any, *, device: Any = "cpu", **how: Any) -> Tensor:
        known = make(data, **how)
        return torch.empty(known.shape, dtype=known.dtype, device=device)

    with torch.device("cpu"):
        make([])  # torch lists its constructors once, for good, where a device is first chosen so
    monkeypatch.setattr(torch, "tensor", make_empty)
    monkeypatch.setattr(Tensor, "any", noted)
    monkeypatch.setattr(Tensor, "__bool__", lambda x: id(x) not in answers and as_bool(x))
