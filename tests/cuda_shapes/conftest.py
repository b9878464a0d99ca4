"""A GPU that is not there: kernels check what they are given, and nothing waits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine import padding, schedule
from kvbench.models.base import FiniteCheck, TextFeatures
from tests.support.fake_device import CUDA
from tests.support.fake_kernels import KERNELS, keeping_all, on_cuda

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stands in for what needs numbers; how often each waits for the device."""
    for name, fake in KERNELS.items():
        monkeypatch.setattr(f"kvbench.kernels.triton.{name}_triton", fake)
    device = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    waits = {"text": 0, "finite": 0}

    def pad(text: TextFeatures, words: int) -> tuple[Tensor, Tensor]:
        waits["text"] += 1
        values = text.values.new_zeros(len(text.lengths), words, text.values.shape[1])
        return values, torch.empty(values.shape[:2], dtype=torch.bool, device=CUDA)

    def conclude(check: FiniteCheck) -> None:
        on_cuda(*check._maxima)
        assert {maximum.shape[1:] for maximum in check._maxima} == {(1,)}
        waits["finite"] += 1

    monkeypatch.setattr(TextFeatures, "pad", pad)
    monkeypatch.setattr(FiniteCheck, "conclude", conclude)
    monkeypatch.setattr(Tensor, "pin_memory", lambda numbers: numbers)
    monkeypatch.setattr(
        "kvbench.models.noise.MIN_THREADED", 1 << 62
    )  # a second thread has tensors with numbers
    return waits


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to what methods that look at data ask of numbers: everything is kept, `if x.any():` is not taken."""
    for module in (schedule, padding):
        monkeypatch.setattr(module, "source_table", keeping_all)
    monkeypatch.setattr(schedule, "are_equal", lambda *_: False)
    find_any, as_bool = Tensor.any, Tensor.__bool__
    answers: dict[int, Tensor] = {}  # holds them, so that no later tensor has an id of theirs

    def noted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        found = find_any(x, *args, **options)
        return answers.setdefault(id(found), found)

    monkeypatch.setattr(Tensor, "any", noted)
    monkeypatch.setattr(Tensor, "__bool__", lambda x: id(x) not in answers and as_bool(x))
