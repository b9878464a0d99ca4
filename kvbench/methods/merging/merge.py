"""Merging of evicted slots into the kept slots with the most similar keys, or, as CaM does, into the next kept slots.

Targets get new contents in place; the contents of evicted slots are not used afterwards.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.methods.shared.select import choose_best

MAX_PAIRS = 2**24
"""Maximum number of pairs of slots whose similarities or weights are in memory at a time."""
SLOT_BATCH = 1024
"""Maximum number of slots that are compared with all slots of their row at a time."""
MIN_NORM = 1e-6
"""Minimum divisor where a norm could be 0."""

How = Literal["none", "pivot", "average", "weighted", "normalised"]
"""New contents of a slot c into which n slots e of similarity w merge (LOOK-M, arXiv:2406.18139, Eq. 10 to 12).

`average` is (c + sum e) / (1 + n), `weighted` is (c + sum w e) / (1 + n), and `pivot` averages each e with c first.
`normalised` (KVCache-Factory) is (c + sum u e) / (1 + sum u), with u = (w + 1) / 2."""


class Pairs(NamedTuple):
    """Evicted slots and their possible merge targets.

    Attributes:
        leaves: bool [rows, slots], evicted slots of the rows that keep at least one slot.
        target: int64 [rows, slots], the kept slot with the most similar key; arbitrary outside `leaves`.
        similarity: float32 [rows, slots], cosine similarity of the two keys; arbitrary outside `leaves`.
    """

    leaves: Tensor
    target: Tensor
    similarity: Tensor


def pair_slots(keys: Tensor, leaves: Tensor, stays: Tensor) -> Pairs:
    """Find the kept slot with the most similar key for each evicted slot, the earlier slot on ties.

    Keys are [rows, slots, D]; evicted slots (`leaves`) and kept slots (`stays`) are bool [rows, slots].
    """
    unit = keys.float()
    unit = unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp(min=MIN_NORM)
    similarity, target = torch.zeros_like(unit[..., 0]), torch.zeros_like(leaves, dtype=torch.int64)
    for rows, slots in split_pairs(leaves):
        cosine = (unit[rows, slots] @ unit[rows].mT).masked_fill_(~stays[rows, None], -torch.inf)
        similarity[rows, slots], target[rows, slots] = cosine.max(-1)
    return Pairs(leaves & stays.any(1, keepdim=True), target, similarity)


def split_pairs(marked: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and of slots, blocks of bool [rows, slots] that are compared with whole rows at a time."""
    rows, slots = marked.shape
    slot_step = max(1, min(slots, SLOT_BATCH))
    row_step = max(1, MAX_PAIRS // max(slot_step * slots, 1))
    for row in range(0, rows, row_step):
        for slot in range(0, slots, slot_step):
            yield slice(row, row + row_step), slice(slot, slot + slot_step)


def sum_sources(x: Tensor, pairs: Pairs, merges: Tensor) -> Tensor:
    """Sum x [rows, slots, channels] over the slots that merge into each target: float32, shaped like x.

    No scatter: the result of atomic additions depends on their order.
    """
    sums = torch.zeros_like(x, dtype=torch.float32)
    for rows, slots in split_pairs(merges):
        one_hot = torch.zeros(*merges[rows, slots].shape, x.shape[1], device=x.device)
        one_hot.scatter_(2, pairs.target[rows, slots, None], merges[rows, slots, None].float())
        sums[rows] += one_hot.mT @ x[rows, slots].float()
    return sums


def merge_slots(
    keys: Tensor, values: Tensor, pairs: Pairs, merges: Tensor, how: How, *, first_sources: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge slots into their targets (`How`): keys and values of all slots, shaped and typed as the arguments.

    Keys and values are [rows, slots, D]. Of the evicted slots, `merges`, bool [rows, slots], are merged and other slots
    are dropped. With `first_sources`, as in LOOK-M's code, their targets get the first evicted slots' contents.
    """
    weight = torch.ones_like(pairs.similarity)
    if how == "weighted":
        weight = pairs.similarity
    elif how == "normalised":
        weight = ((pairs.similarity + 1) / 2).clamp(min=MIN_NORM)
    elif how == "pivot":
        weight = weight / 2
    weight = weight.masked_fill(~merges, 0)
    contents = torch.cat((keys.float(), values.float()), -1)
    sources = _take_first(contents, pairs.leaves, merges) if first_sources else contents
    payload = torch.cat((sources * weight[..., None], weight[..., None], merges[..., None].float()), -1)
    sums, total, count = sum_sources(payload, pairs, merges).split((contents.shape[-1], 1, 1), -1)
    own = 1 + total if how == "pivot" else 1
    merged = (own * contents + sums) / (1 + (total if how == "normalised" else count))
    merged = torch.where(count > 0, merged, contents)
    channels = keys.shape[-1]
    return merged[..., :channels].to(keys.dtype), merged[..., channels:].to(values.dtype)


def _take_first(contents: Tensor, leaves: Tensor, merges: Tensor) -> Tensor:
    """Return the contents of the j-th evicted slot at the j-th slot that merges, [rows, slots, channels]."""
    order = leaves.int().sort(dim=1, descending=True, stable=True).indices
    rank = (merges.cumsum(1) - 1).clamp(min=0)
    return contents.gather(1, order.gather(1, rank)[..., None].expand_as(contents))


def select_ranks(pairs: Pairs, heads: int, threshold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the slots to merge by their rank among a row's evicted slots, equally in a sequence's heads.

    Slots of rank i merge if the mean similarity of rank i over the heads of a sequence reaches a threshold, float32
    [sequences]; None for the mean similarity over all evicted slots of a sequence. Returns the slots, bool [rows,
    slots], and these means, float32 [sequences].
    """
    rank = (pairs.leaves.cumsum(1) - 1).clamp(min=0)
    unused = pairs.leaves.shape[1]  # rank of slots that are not evicted
    rank_or_unused = torch.where(pairs.leaves, rank, unused)
    weight = pairs.similarity.masked_fill(~pairs.leaves, 0)
    values = torch.stack((weight, pairs.leaves.float()), -1)
    by_rank = weight.new_zeros(len(weight), unused + 1, 2)
    by_rank.scatter_(1, rank_or_unused[..., None].expand_as(values), values)
    sums, counts = by_rank[:, :-1].unflatten(0, (-1, heads)).sum(1).unbind(-1)
    mean = sums.sum(1) / counts.sum(1).clamp(min=1)
    reached = sums / counts.clamp(min=1) >= (mean if threshold is None else threshold)[:, None]
    return reached.repeat_interleave(heads, 0).gather(1, rank) & pairs.leaves, mean


def restore_lengths(merged: Tensor, keys: Tensor) -> Tensor:
    """Scale merged keys [rows, slots, D] to the norms of the original keys."""
    norm = torch.linalg.vector_norm(keys.float(), dim=-1, keepdim=True)
    merged_norm = torch.linalg.vector_norm(merged.float(), dim=-1, keepdim=True).clamp(min=MIN_NORM)
    return (merged.float() * (norm / merged_norm)).to(merged.dtype)


def merge_values(
    values: Tensor, pairs: Pairs, threshold: float, fraction: float, official_quantile: bool = False
) -> Tensor:
    """Merge the values of evicted slots into their targets: values of all slots, [rows, slots, D] (MergingPress).

    A slot has the weight max(w, 0) |v_e| / (|v_e| + |v_c|), its target 1. Only slots with a similarity of at least
    `threshold` merge. Their number is at most a `fraction` of the evicted slots, the most similar first. With
    `official_quantile` they are the slots from the (1 - fraction) quantile of a row on, none where it is undefined.
    """
    passes = pairs.leaves & (pairs.similarity >= threshold)
    if fraction < 1:
        passes &= _find_most_similar(pairs, passes, fraction, official_quantile)
    norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
    share = norms / (norms + norms.gather(1, pairs.target) + MIN_NORM)
    weight = (pairs.similarity.clamp(min=0) * share).masked_fill(~passes, 0)
    payload = torch.cat((values.float() * weight[..., None], weight[..., None]), -1)
    sums, total = sum_sources(payload, pairs, passes).split((values.shape[-1], 1), -1)
    return torch.where(total > 0, (values.float() + sums) / (1 + total), values.float()).to(values.dtype)


def _find_most_similar(pairs: Pairs, passes: Tensor, fraction: float, official: bool) -> Tensor:
    """Return a mask of the most similar evicted slots, bool [rows, slots]."""
    count = pairs.leaves.sum(1, keepdim=True)
    similarity = pairs.similarity.masked_fill(~passes, -torch.inf)
    if not official:
        return choose_best(similarity, (fraction * count.double()).ceil().long()[:, 0])
    # Slots that are not evicted are sorted last.
    ascending = similarity.masked_fill(~pairs.leaves, torch.inf).sort(1).values
    index = (1 - fraction) * (count.double() - 1).clamp(min=0)
    low, high = (ascending.gather(1, end.long()) for end in (index.floor(), index.ceil()))
    quantile = low + (high - low) * (index - index.floor()).float()
    return similarity >= quantile  # False if the quantile is NaN


def find_windows(stays: Tensor, size: int, rows: slice, slots: slice) -> Tensor:
    """Return the next `size` kept slots after each of some slots, bool [some rows, some slots, slots]."""
    number = stays[rows].cumsum(1)  # number of kept slots up to each slot
    ahead = number[:, None] - number[:, slots, None]
    return stays[rows, None] & (ahead > 0) & (ahead <= size)


def measure_probabilities(attention: Tensor, merges: Tensor, stays: Tensor, size: int) -> Tensor:
    """Return the probability that each slot is merged, float32 [rows, slots]; 0 where it does not merge.

    It is the slot's attention, float32 [rows, slots], divided by the mean attention of its window, at most 1. If this
    mean is 0 or the window is empty, it is 1, or 0 for a slot without attention. Evicted slots that may be merged, and
    kept slots, are bool [rows, slots]. A window has `size` kept slots.
    """
    mean = torch.zeros_like(attention)
    for rows, slots in split_pairs(merges):
        window = find_windows(stays, size, rows, slots).float()
        sums = (window @ attention[rows, :, None])[..., 0]
        mean[rows, slots] = sums / window.sum(-1).clamp(min=1)
    ratio = torch.where(mean > 0, attention / mean.where(mean > 0, 1), (attention > 0).float())
    return ratio.clamp(0, 1).masked_fill(~merges, 0)


def add_values(
    values: Tensor,
    weight: Tensor,
    stays: Tensor,
    size: int,
    *,
    divisor: int | None = None,
    normalise: bool = False,
) -> Tensor:
    """Add evicted values to the values of their windows in equal parts: [rows, slots, D] in the dtype of `values`.

    Weights of merged slots are float32 [rows, slots]; kept slots are bool [rows, slots], `size` of them in a window. A
    value is divided by the number of slots in its window, or by `divisor`. `normalise` divides each sum by 1 plus the
    added weights.
    """
    payload = torch.cat((values.float(), torch.ones_like(values[..., :1], dtype=torch.float32)), -1)
    added = torch.zeros_like(payload)
    for rows, slots in split_pairs(stays):
        window = find_windows(stays, size, rows, slots).float()
        count = window.sum(-1, keepdim=True).clamp(min=1) if divisor is None else divisor
        added[rows] += (window * (weight[rows, slots, None] / count)).mT @ payload[rows, slots]
    total, weights = values.float() + added[..., :-1], added[..., -1:]
    return (total / (1 + weights) if normalise else total).to(values.dtype)
