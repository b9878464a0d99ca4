"""Bias of slots: a value added to all scores of a slot, stored as an additional channel of its key.

Queries have 1 over the scale in that channel, so that attention adds the bias. Kernels need channels in multiples of
eight; the other seven are zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.engine.memory import BIAS_CHANNELS


def widen(x: Tensor) -> Tensor:
    """Append zero channels to x [..., D]: keys without a bias, or values."""
    return F.pad(x, (0, BIAS_CHANNELS))


def widen_queries(q: Tensor, scale: float) -> Tensor:
    """Append channels to queries [..., D], so that `scale` q k^T includes the bias of wide keys."""
    wide = widen(q)
    wide[..., -BIAS_CHANNELS] = 1 / scale
    return wide


def attach_bias(keys: Tensor, bias: Tensor) -> Tensor:
    """Append a bias [...], in nats, to keys [..., D]: [..., D + BIAS_CHANNELS]."""
    wide = widen(keys)
    wide[..., -BIAS_CHANNELS] = bias
    return wide


def read_bias(keys: Tensor) -> Tensor:
    """Return the bias of wide keys [..., D + BIAS_CHANNELS], float32 [...] in nats."""
    return keys[..., -BIAS_CHANNELS].to(torch.float32)


def narrow(x: Tensor) -> Tensor:
    """Remove the additional channels from keys, values or outputs."""
    return x[..., :-BIAS_CHANNELS]
