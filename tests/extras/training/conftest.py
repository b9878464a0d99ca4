"""Passes in bfloat16 on every processor, because the numbers that trainings are compared with were made so."""

import pytest
import torch


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
