"""Redundancy of keys: the similarity of a key to the other keys of its head (R-KV, arXiv:2505.24133)."""

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_SIMILARITIES = 2**26
"""Maximum number of similarities in memory at a time."""


def measure_redundancy(
    keys: Tensor, exists: Tensor, threshold: float, protected: int, *, normalize: bool = True
) -> Tensor:
    """Measure how much other keys repeat each key: float32 [rows, slots], each row with a sum of 1.

    Args:
        keys: [rows, slots, D] in order of position, 0 in slots that a row lacks.
        exists: bool [rows, slots], slots that a row has; the result is 0 in the other slots.
        threshold: cosine similarity above which two keys are near copies.
        protected: number of the latest near copies of a key whose similarity counts as 0.
        normalize: take the softmax; otherwise return the mean similarities, -inf in slots that a row lacks.
    """
    few = max(1, MAX_SIMILARITIES // keys.shape[1] ** 2)  # rows
    parts = zip(keys.split(few), exists.split(few), strict=True)
    mean = torch.cat([_average_similarity(*part, threshold, protected) for part in parts])
    return mean.softmax(-1) if normalize else mean


def _average_similarity(keys: Tensor, exists: Tensor, threshold: float, protected: int) -> Tensor:
    unit = F.normalize(keys.float(), dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    similarity.diagonal(dim1=1, dim2=2).zero_()
    near = similarity > threshold
    later = near.flip(2).cumsum(2, dtype=torch.int32).flip(2)  # near copies from this one to the latest
    total = similarity.masked_fill(near & (later <= protected), 0).sum(1)
    mean = total / exists.sum(1, keepdim=True)
    return mean.masked_fill(~exists, -torch.inf)
