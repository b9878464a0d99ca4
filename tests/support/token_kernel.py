"""The one-token kernel in torch: only the device knows where rows are, how long they are, and what came before."""

import torch
from torch import Tensor

from kvbench.kernels.layout import RowOffsets

KERNEL = "kvbench.kernels.triton.decode_attention.decode_attention_triton"
"""Name of the kernel's launcher, for a patch."""


def decode(q: Tensor, k: Tensor, v: Tensor, rows: RowOffsets, scale: float) -> Tensor:
    """What `decode_attention_triton` computes."""
    channels = q.shape[3]
    place = torch.arange(len(rows.keys) // channels)
    end = rows.lengths + rows.filled
    seen = place <= end[:, None]
    first = torch.arange(len(q))[:, None, None] * rows.stride  # of each sequence
    parts = []
    for storage, offsets, new in ((rows.keys, rows.key_offsets, k), (rows.values, rows.value_offsets, v)):
        slots = storage.view(-1, channels)
        start = first + offsets[:, None]
        slots.index_copy_(0, (start + end[:, None]).flatten(), new.flatten(0, 2).to(storage.dtype))
        every = (start + place).clamp(max=len(slots) - 1)
        found = slots.index_select(0, every.flatten()).view(*every.shape, channels)
        parts.append(found.masked_fill(~seen[..., None], 0).to(q.dtype))
    scores = (q @ parts[0].mT * scale).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ parts[1]
