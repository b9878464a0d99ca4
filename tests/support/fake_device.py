"""Stand-in for a GPU in tests: tensors without numbers on it, and what it answers, so that choices can be tested."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvbench.kernels.varlen_attention import find_varlen

CUDA = torch.device("cuda:0")


def faked(value: Any) -> Any:
    """The same shapes on the device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=CUDA)
    if hasattr(value, "_fields"):
        return type(value)(*map(faked, value))
    return tuple(map(faked, value)) if isinstance(value, tuple) else value


class Device(NamedTuple):
    """What is asked about a device."""

    name: str = "a GPU"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    shared_memory_per_block_optin: int = 232448


def stand_in(patch: pytest.MonkeyPatch, device: Device, cudnn: int = 92600, flash: str | None = None) -> None:
    """Answer for a device, a version of cuDNN as torch counts, and the active FlashAttention; torch is 2.15."""
    if find_varlen() is None:
        patch.setattr("kvbench.kernels.varlen_attention.find_varlen", lambda: pytest.fail)
        patch.setattr("torch.__version__", "2.15.0")
    patch.setattr("torch.cuda.get_device_properties", lambda _: device)
    patch.setattr("torch.cuda.get_device_capability", lambda *_: (device.major, device.minor))
    patch.setattr("torch.backends.cudnn.version", lambda: cudnn)
    for module in ("fused_attention", "attention_paths"):
        patch.setattr(f"kvbench.kernels.{module}.current_flash_attention_impl", lambda: flash)
    patch.setattr("kvbench.kernels.fused_attention._is_single_query_disabled", lambda: False)
