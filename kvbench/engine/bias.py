"""A number that is added to every score of a slot, stored as one more channel of its key.

Queries have 1 over the scale there, so that every attention adds the number by itself. Kernels want channels in
multiples of eight; the other seven are zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.engine.memory import BIAS_CHANNELS


def widen(x: Tensor) -> Tensor:
    """Return x [..., D] with the channels behind it, all zero: keys without a bias, or values."""
    return F.pad(x, (0, BIAS_CHANNELS))


def widen_queries(q: Tensor, scale: float) -> Tensor:
    """Return queries [..., D] with the channels behind them, so that `scale` q k^T contains the bias of k."""
    wide = widen(q)
    wide[..., -BIAS_CHANNELS] = 1 / scale
    return wide


def attach_bias(keys: Tensor, bias: Tensor) -> Tensor:
    """Return keys [..., D + BIAS_CHANNELS] of keys [..., D] and their bias [...], in nats."""
    wide = widen(keys)
    wide[..., -BIAS_CHANNELS] = bias
    return wide


def read_bias(keys: Tensor) -> Tensor:
    """Return the bias float32 [...] of wide keys [..., D + BIAS_CHANNELS], in nats."""
    return keys[..., -BIAS_CHANNELS].to(torch.float32)


def narrow(x: Tensor) -> Tensor:
    """Return wide keys, values or outputs without the channels."""
    return x[..., :-BIAS_CHANNELS]
