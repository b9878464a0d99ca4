"""Attention of trainings equals torch's."""

import pytest
import torch
from torch.nn import functional as F

from kvbench.extras.training import attention


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_in_parts_is_causal_attention(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 3)
    q, k, v = torch.randn(2, 4 * groups, 10, 8), torch.randn(2, 4, 10, 8), torch.randn(2, 4, 10, 8)
    found = attention.attend_causally(0, q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    torch.testing.assert_close(found, expected)
