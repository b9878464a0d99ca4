"""Dtype of the passes of a training on each kind of device."""

import pytest
import torch

from kvbench.extras.training.precision import autocast, choose_dtype


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [
        ("cpu", "AVX2", torch.float32),
        ("cpu", "AVX512", torch.bfloat16),
        ("cpu", "DEFAULT", torch.float32),
        ("cuda", "AVX2", torch.bfloat16),
    ],
)
def test_processors_without_avx512_multiply_in_float32(
    device: str, capability: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose_dtype(torch.device(device)) is dtype
    if device == "cpu":
        with autocast(torch.device(device)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
