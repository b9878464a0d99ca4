"""Logits are checked on a CPU at once, on a GPU when all scales ran."""

import pytest
import torch

from kvbench.models.base import FiniteCheck, NotFinite


def test_a_cpu_is_asked_at_once() -> None:
    check, logits = FiniteCheck(), torch.zeros(3, 4, 2)
    check.note(logits, 0)
    logits[2, 1] = torch.inf
    with pytest.raises(NotFinite, match="prompt 2 of the batch, scale 1"):
        check.note(logits, 1)
    check.conclude()


def test_a_gpu_is_asked_in_the_end() -> None:
    check = FiniteCheck()
    check._worst = [torch.ones(3, 1), torch.tensor([[1.0], [torch.nan], [torch.inf]])]
    with pytest.raises(NotFinite, match="prompt 1 of the batch, scale 1"):
        check.conclude()
