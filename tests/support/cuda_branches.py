"""The branches of CUDA on a CPU: tensors say that they are on a GPU, and Triton interprets its programs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvbench.kernels import ragged_attention, varlen_attention
from kvbench.kernels.attention_paths import Path
from tests.support.slow_varlen import attend_slowly


@contextmanager
def on_cuda_branches(path: Path = "kernel") -> Iterator[None]:
    """Have code that asks `is_cuda` of a tensor do what it does on a GPU.

    Args:
        path: the way that attention over past and present goes; a GPU's shape would decide.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
        patch.setattr(ragged_attention, "choose_path", lambda *_: path)
        patch.setattr(varlen_attention, "find_varlen", lambda: attend_slowly)
        patch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", attend_with_bias)
        yield


def attend_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, _: bool) -> tuple[Tensor]:
    """What torch's attention on a GPU computes of a mask that is added, for the text's tokens."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5 + bias.float()
    return ((scores.softmax(-1) @ v.float()).to(q.dtype),)
