"""The device that is chosen where none is named."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core import gpus
from kvbench.core.gpus import resolve_device, resolve_noise


@pytest.mark.parametrize(
    ("cards", "seen", "built", "device"),
    [
        (0, None, True, "cpu"), (2, None, True, "cuda"), (2, None, False, "cpu"), (2, "", True, "cpu"),
        (2, "-1", True, "cpu"), (2, "NoDevFiles", True, "cpu"), (2, "1,0", True, "cuda"),
        (2, "2", True, "cpu"), (2, "GPU-7e", True, "cuda"), (0, "0", True, "cpu"),
    ],
)  # fmt: skip
def test_auto_is_the_gpu_that_torch_can_use(
    cards: int, seen: str | None, built: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVBENCH_DEVICE")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(gpus, "_count_gpus", lambda: cards)
    monkeypatch.setattr(gpus, "_is_torch_for_cuda", lambda: built)
    assert resolve_device("auto") == device
    assert resolve_device("cuda:3") == "cuda:3"
    monkeypatch.setenv("KVBENCH_DEVICE", "cuda:1")
    assert resolve_device("auto") == "cuda:1"


@pytest.mark.parametrize(
    ("noise", "device", "kind"),
    [
        ("auto", "cpu", "stream"),
        ("auto", "cuda", "counter"),
        ("auto", "cuda:1", "counter"),
        ("stream", "cuda", "stream"),
        ("counter", "cpu", "counter"),
    ],
)
def test_noise_is_counted_on_a_gpu(noise: str, device: str, kind: str) -> None:
    assert resolve_noise(noise, device) == kind


@pytest.mark.parametrize(("cards", "status", "found"), [(8, 0, 8), (8, 9, 0), (None, 0, 0)])
def test_the_driver_counts_the_cards(
    cards: int | None, status: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(count: Any) -> int:
        count._obj.value = cards
        return 0

    def load(name: str) -> Any:
        if cards is None:
            raise OSError(name)
        driver = {"nvmlInit_v2": lambda: status, "nvmlDeviceGetCount_v2": give, "nvmlShutdown": lambda: 0}
        return SimpleNamespace(**driver)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert gpus._count_gpus.__wrapped__() == found


def test_the_build_of_torch_is_known_without_its_import() -> None:
    import torch

    assert gpus._is_torch_for_cuda() == (torch.version.cuda is not None)
