"""Merging of slots that leave into the slots that stay, of most similar key.

Slots stay where they are: a slot that takes others in has new contents, those of slots that leave do not matter.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.methods.shared.select import choose_best

AT_ONCE = 2**24
"""Pairs of slots whose similarities or weights are held at once."""
SLOTS_AT_ONCE = 1024
"""Slots that are compared with all others at once."""
MIN_NORM = 1e-6

How = Literal["none", "pivot", "average", "weighted", "normalised"]
"""New contents of a slot c that takes in n slots e of similarity w (LOOK-M, arXiv:2406.18139, Eq. 10 to 12).

`average` is (c + sum e) / (1 + n), `weighted` (c + sum w e) / (1 + n), and `pivot` averages each e with c before. In
`normalised`, of KVCache-Factory, u = (w + 1) / 2 takes the place of w and of the ones that n counts."""


class Pairs(NamedTuple):
    """Slots that leave, and slots that they may merge into.

    Attributes:
        leaves: bool [rows, slots], slots that leave and for which the row keeps another.
        target: int64 [rows, slots], the slot that stays and whose key is most similar; of others than `leaves` it does
            not matter, nor does `similarity`.
        similarity: float32 [rows, slots], cosine of the two keys.
    """

    leaves: Tensor
    target: Tensor
    similarity: Tensor


def pair_slots(keys: Tensor, leaves: Tensor, stays: Tensor) -> Pairs:
    """Find for each slot that leaves the one that stays of most similar key, the earlier one on ties.

    Args:
        keys: [rows, slots, D].
        leaves: bool [rows, slots].
        stays: bool [rows, slots].
    """
    unit = keys.float()
    unit = unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp(min=MIN_NORM)
    similarity, target = torch.zeros_like(unit[..., 0]), torch.zeros_like(leaves, dtype=torch.int64)
    for rows, slots in split_pairs(leaves):
        cosine = (unit[rows, slots] @ unit[rows].mT).masked_fill_(~stays[rows, None], -torch.inf)
        similarity[rows, slots], target[rows, slots] = cosine.max(-1)
    return Pairs(leaves & stays.any(1, keepdim=True), target, similarity)


def split_pairs(marked: Tensor) -> Iterator[tuple[slice, slice]]:
    """Split bool [rows, slots] into parts that can be compared with all slots of their rows at once."""
    rows, slots = marked.shape
    part = max(1, min(slots, SLOTS_AT_ONCE))
    few = max(1, AT_ONCE // max(part * slots, 1))
    for row in range(0, rows, few):
        for slot in range(0, slots, part):
            yield slice(row, row + few), slice(slot, slot + part)


def pour(x: Tensor, pairs: Pairs, merges: Tensor) -> Tensor:
    """Sum x [rows, slots, channels] of the slots that merge over each target: float32, shaped like x.

    Not scattered: the result of atomic additions depends on their order.
    """
    poured = torch.zeros_like(x, dtype=torch.float32)
    for rows, slots in split_pairs(merges):
        one = torch.zeros(*merges[rows, slots].shape, x.shape[1], device=x.device)
        one.scatter_(2, pairs.target[rows, slots, None], merges[rows, slots, None].float())
        poured[rows] += one.mT @ x[rows, slots].float()
    return poured


def merge_slots(
    keys: Tensor, values: Tensor, pairs: Pairs, merges: Tensor, how: How, *, first_sources: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge slots into their targets; returns keys and values of all slots, shaped and typed as they came.

    Args:
        keys: [rows, slots, D].
        values: shaped like `keys`.
        pairs: what leaves.
        merges: bool [rows, slots], those of `pairs.leaves` that are merged; others are dropped.
        how: see `How`.
        first_sources: take as many slots in as merge, but always the first that leave, as a released program does.
    """
    if how == "none":
        return keys, values
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
    poured, total, count = pour(payload, pairs, merges).split((contents.shape[-1], 1, 1), -1)
    own = 1 + total if how == "pivot" else 1
    merged = (own * contents + poured) / (1 + (total if how == "normalised" else count))
    merged_keys, merged_values = torch.where(count > 0, merged, contents).split(
        (keys.shape[-1], values.shape[-1]), -1
    )
    return merged_keys.to(keys.dtype), merged_values.to(values.dtype)


def _take_first(contents: Tensor, leaves: Tensor, merges: Tensor) -> Tensor:
    """Return for the j-th slot of a row that merges the contents of the j-th that leaves, [rows, slots, channels]."""
    order = leaves.int().sort(dim=1, descending=True, stable=True).indices
    place = (merges.cumsum(1) - 1).clamp(min=0)
    return contents.gather(1, order.gather(1, place)[..., None].expand_as(contents))


def select_ranks(pairs: Pairs, heads: int, threshold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select what merges in all heads of a sequence alike: by the number of a slot among those of its head that leave.

    Slots of number i merge if the heads' mean similarity of their i-th slots reaches a threshold.

    Args:
        pairs: what leaves.
        heads: rows of a sequence.
        threshold: float32 [sequences]; None for the mean similarity of all that leaves of a sequence.

    Returns:
        bool [rows, slots], and the mean similarities, float32 [sequences].
    """
    number = (pairs.leaves.cumsum(1) - 1).clamp(min=0)
    unused = pairs.leaves.shape[1]  # where slots go that do not leave
    place = torch.where(pairs.leaves, number, unused)
    weight = pairs.similarity.masked_fill(~pairs.leaves, 0)
    listed = weight.new_zeros(len(weight), unused + 1, 2)
    both = torch.stack((weight, pairs.leaves.float()), -1)
    listed.scatter_(1, place[..., None].expand_as(both), both)
    sums, counts = listed[:, :-1].unflatten(0, (-1, heads)).sum(1).unbind(-1)
    mean = sums.sum(1) / counts.sum(1).clamp(min=1)
    reached = sums / counts.clamp(min=1) >= (mean if threshold is None else threshold)[:, None]
    return reached.repeat_interleave(heads, 0).gather(1, number) & pairs.leaves, mean


def restore_lengths(merged: Tensor, keys: Tensor) -> Tensor:
    """Scale merged keys [rows, slots, D] to the lengths that the slots' keys had."""
    length = torch.linalg.vector_norm(keys.float(), dim=-1, keepdim=True)
    now = torch.linalg.vector_norm(merged.float(), dim=-1, keepdim=True).clamp(min=MIN_NORM)
    return (merged.float() * (length / now)).to(merged.dtype)


def merge_values(
    values: Tensor, pairs: Pairs, threshold: float, fraction: float, official_quantile: bool = False
) -> Tensor:
    """Merge the values of slots that leave into their targets' by similarity and norms (kvpress's MergingPress).

    A slot weighs max(w, 0) |v_e| / (|v_e| + |v_c|), its target 1.

    Args:
        values: [rows, slots, D].
        pairs: what leaves.
        threshold: least similarity of what merges.
        fraction: of what leaves, the most similar that merge.
        official_quantile: merge what reaches the (1 - fraction) quantile of a row, and nothing where that is undefined.

    Returns:
        The values of all slots, shaped and typed as they came.
    """
    passes = pairs.leaves & (pairs.similarity >= threshold)
    if fraction < 1:
        passes &= _find_most_similar(pairs, passes, fraction, official_quantile)
    norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
    share = norms / (norms + norms.gather(1, pairs.target) + MIN_NORM)
    weight = (pairs.similarity.clamp(min=0) * share).masked_fill(~passes, 0)
    payload = torch.cat((values.float() * weight[..., None], weight[..., None]), -1)
    poured, total = pour(payload, pairs, passes).split((values.shape[-1], 1), -1)
    return torch.where(total > 0, (values.float() + poured) / (1 + total), values.float()).to(values.dtype)


def _find_most_similar(pairs: Pairs, passes: Tensor, fraction: float, official: bool) -> Tensor:
    """Return which slots are among the most similar that leave, bool [rows, slots]."""
    count = pairs.leaves.sum(1, keepdim=True)
    similarity = pairs.similarity.masked_fill(~passes, -torch.inf)
    if not official:
        return choose_best(similarity, (fraction * count.double()).ceil().long()[:, 0])
    # What does not leave lies behind the others.
    ascending = similarity.masked_fill(~pairs.leaves, torch.inf).sort(1).values
    place = (1 - fraction) * (count.double() - 1).clamp(min=0)
    low, high = (ascending.gather(1, end.long()) for end in (place.floor(), place.ceil()))
    quantile = low + (high - low) * (place - place.floor()).float()
    return similarity >= quantile  # never where that is NaN
