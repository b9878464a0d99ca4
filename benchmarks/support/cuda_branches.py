"""CUDA branches on a CPU: tensors claim to be on a GPU, and Triton interprets its kernels."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.support.slow_varlen import attend_slowly
from kvbench.kernels import ragged_attention, varlen_attention
from kvbench.kernels.attention_paths import Path


@contextmanager
def on_cuda_branches(path: Path = "kernel") -> Iterator[None]:
    """Make code that checks `is_cuda` take its GPU branch.

    `TRITON_INTERPRET=1` must be set before the first import of a Triton kernel.

    Args:
        path: path of attention over past and present, which on a GPU depends on the shape.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "is_cuda", property(lambda _: True)))
        stack.enter_context(patch.object(ragged_attention, "choose_path", lambda *_: path))
        stack.enter_context(patch.object(varlen_attention, "find_varlen", lambda: attend_slowly))
        stack.enter_context(
            patch.object(torch.ops.aten, "_scaled_dot_product_efficient_attention", attend_with_bias)
        )
        yield


def attend_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, _: bool) -> tuple[Tensor]:
    """Compute torch's GPU attention with an additive mask, for the tokens of the text."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5 + bias.float()
    return ((scores.softmax(-1) @ v.float()).to(q.dtype),)
