"""GPUs of this machine, which of them a process takes, and sums over processes that share a model."""

import ctypes
import os
import subprocess
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvbench.core import devices, gpus
from kvbench.core.config import ConfigError
from kvbench.core.devices import count_gpus, take_gpu, use_device
from kvbench.core.gpus import resolve_device, resolve_noise
from kvbench.core.processes import Processes


@pytest.mark.parametrize(
    ("device", "number", "seen", "used", "taken"),
    [
        ("cuda", 1, None, False, "1"), ("cuda", 5, None, False, "1"),
        ("cuda", 1, "4,GPU-7,2,9", False, "GPU-7"), ("cuda:2", 1, "4,GPU-7,2,9", False, "2"),
        ("cpu", 1, None, False, None), ("cuda", 1, "3,4", True, "3,4"),
    ],
)  # fmt: skip
def test_each_process_takes_a_gpu_unless_it_uses_one(
    device: str, number: int, seen: str | None, used: bool, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    take_gpu(device, number)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == taken


def test_gpus_are_counted_elsewhere_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would ask CUDA, which reads CUDA_VISIBLE_DEVICES once."""

    def lack(name: str) -> None:
        raise OSError(name)

    found = []
    monkeypatch.setattr(ctypes, "CDLL", lack)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("this process initialises CUDA"))
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *given, **_: found.append(given) or subprocess.CompletedProcess([], 0, "3\n"),
    )
    assert count_gpus() == 3
    assert found


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the GPUs that torch was told to use, on a machine that seems to have two."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end, whether it was there or not
        monkeypatch.delenv(name)
    return found


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_the_device_of_a_job_is_the_current_one(name: str, number: int, chosen: list[int]) -> None:
    """Triton launches on the current device, whatever its tensors' is; torch refuses one without a number."""
    use_device(name)
    assert chosen == [number]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not torch.backends.cudnn.allow_tf32


def test_allocator_settings_of_the_user_stay(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    use_device("cuda")
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_device_that_is_not_there_is_told(chosen: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"device=cuda:2: torch finds cuda:0 to cuda:1 here"):
        use_device("cuda:2")
    use_device("cpu")
    assert not chosen


@pytest.mark.parametrize(
    ("cards", "seen", "built", "device"),
    [
        (0, None, True, "cpu"), (2, None, True, "cuda"), (2, None, False, "cpu"), (2, "", True, "cpu"),
        (2, "-1", True, "cpu"), (2, "1,0", True, "cuda"), (2, "2", True, "cpu"), (2, "GPU-7e", True, "cuda"),
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


def test_noise_is_counted_on_a_gpu() -> None:
    assert [resolve_noise("auto", device) for device in ("cpu", "cuda:1")] == ["stream", "counter"]
    assert (resolve_noise("stream", "cuda"), resolve_noise("counter", "cpu")) == ("stream", "counter")


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


def take_part(rank: int, meeting: str) -> tuple[list[float], str, list[int]]:
    store = dist.FileStore(meeting, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1))
    both = Processes(rank, 2)
    total = both.add(torch.tensor([1.0, 10.0 * rank]))
    return total.tolist(), both.broadcast(f"by {rank}"), both.gather(rank)


def test_two_processes_add_broadcast_and_gather(tmp_path) -> None:
    meeting = str(tmp_path / "store")
    with get_context("fork").Pool(2) as members:
        found = members.starmap(take_part, [(0, meeting), (1, meeting)], chunksize=1)
    assert found == [([2.0, 10.0], "by 0", [0, 1]), ([2.0, 10.0], "by 0", [1])]
