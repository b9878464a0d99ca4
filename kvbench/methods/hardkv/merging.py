"""Tokens that leave are merged into tokens that stay, so that the log-sum-exp of attention falls less.

Source: Hard-KV, appendix G, and the released program. A key that is an average of keys with weights w has a score of
lse(s) - H(w), H the entropy of w: whatever the weights, its mass is less than that of the keys it stands for
(`merge_fixed_budget`, `merge_multi_to_one`). With a number added to its score it can be the same (`merge_exactly`,
which the paper does not have).

Slots stay where they are: a slot that takes another in has new contents, those of slots that leave do not matter.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """Slots that leave, slots that they may merge into, and the weight of each slot.

    Attributes:
        score: float32 [rows, slots], what a method chooses slots by.
        mass: float32 [rows, slots], mean attention of each slot.
        leaves: bool [rows, slots].
        takes: bool [rows, slots], slots that stay and may take others in; none of them leaves.
    """

    score: Tensor
    mass: Tensor
    leaves: Tensor
    takes: Tensor


def pair_slots(choice: Choice) -> Tensor:
    """Give the slot of least score that leaves to the slot of most mass that takes, the next to the next, and so on.

    A slot takes in one other at most. Where more leave than take, those of least score go to nobody.

    Returns:
        int64 [rows, slots], the slot that each slot takes in, itself where it takes none.
    """
    leaving = choice.score.masked_fill(~choice.leaves, torch.inf).argsort(dim=1, stable=True)
    taking = choice.mass.masked_fill(~choice.takes, -torch.inf).argsort(dim=1, descending=True, stable=True)
    leave, take = (marked.sum(1, keepdim=True) for marked in (choice.leaves, choice.takes))
    place = torch.arange(leaving.shape[1], device=leaving.device).expand_as(leaving)
    given = leaving.gather(1, (place + (leave - take).clamp(min=0)).clamp(max=leaving.shape[1] - 1))
    given = torch.where(place < torch.minimum(leave, take), given, taking)
    return torch.empty_like(taking).scatter_(1, taking, given)


def merge_fixed_budget(keys: Tensor, values: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Average each pair of `pair_slots`, weighted by mass.

    The program asserts that no more tokens leave than stay; here the least of them are lost.

    Args:
        keys: [rows, slots, D].
        values: shaped like `keys`.
        choice: what becomes of the slots.

    Returns:
        Keys and values of all slots, shaped and typed as they came.
    """
    other = pair_slots(choice)
    own = _share_mass(choice.mass, other)
    return _average(keys, other, own), _average(values, other, own)


def merge_multi_to_one(keys: Tensor, values: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Average all that leaves of a row with the slot of best score that takes, weighted by mass.

    Arguments and result are those of `merge_fixed_budget`; a row in which no slot takes stays as it is.
    """
    best = choice.score.masked_fill(~choice.takes, -torch.inf).argmax(1, keepdim=True)
    into = torch.zeros_like(choice.takes).scatter_(1, best, value=True) & choice.takes
    mass = choice.mass.masked_fill(~(choice.leaves | into), 0)
    total = mass.sum(1, keepdim=True)
    into &= total > 0
    weights = (mass / total.where(total > 0, 1))[:, None]

    def merge(x: Tensor) -> Tensor:
        return torch.where(into[..., None], (weights @ x.float()).to(x.dtype), x)

    return merge(keys), merge(values)


def merge_exactly(
    keys: Tensor, values: Tensor, bias: Tensor, choice: Choice
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the key of each pair's heavier slot, average the values, and add what its score lacks to a bias.

    The mean over the queries of exp(score + bias - lse), lse as it was before, is then that of both slots together.

    Args:
        keys: [rows, slots, D].
        values: shaped like `keys`.
        bias: float32 [rows, slots], nats that scores of each slot already have more than its key gives.
        choice: what becomes of the slots.

    Returns:
        Keys, values and bias of all slots.
    """
    other = pair_slots(choice)
    own = _share_mass(choice.mass, other)
    slot = torch.arange(other.shape[1], device=other.device).expand_as(other)
    heavier = torch.where(own < 0.5, other, slot)
    lacking = -torch.maximum(own, 1 - own).log()
    merged = keys.gather(1, heavier[..., None].expand_as(keys))
    return merged, _average(values, other, own), bias.gather(1, heavier) + lacking


def _share_mass(mass: Tensor, other: Tensor) -> Tensor:
    """Return each slot's share of its pair's mass, float32 [rows, slots]; 1 where it takes nothing in."""
    taken = mass.gather(1, other)
    alone = (other == torch.arange(other.shape[1], device=other.device)) | (taken <= 0)
    return torch.where(alone, 1, mass / (mass + taken))


def _average(x: Tensor, other: Tensor, own: Tensor) -> Tensor:
    """Average the slots of x [rows, slots, D] with those they take in; `own` is their share."""
    taken = x.gather(1, other[..., None].expand_as(x))
    return torch.lerp(taken.float(), x.float(), own[..., None]).to(x.dtype)
