"""Merging of evicted tokens into kept tokens, which reduces the loss of attention's log-sum-exp.

Source: Hard-KV, appendix G, and the released program. If a key is an average of keys with weights w, its score is at
most lse(s) - H(w), where H is the entropy of w: for all weights its mass is less than the mass of the averaged keys
(`merge_fixed_budget`, `merge_multi_to_one`). A bias of the score can restore the mass (`merge_exactly`, which is not in
the paper).

Merging does not move slots: target slots get new contents, and the contents of evicted slots are arbitrary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class MergePlan(NamedTuple):
    """Evicted slots, target slots, and the weight of each slot.

    Attributes:
        score: float32 [rows, slots], score of the method.
        mass: float32 [rows, slots], mean attention of each slot.
        evicted: bool [rows, slots].
        targets: bool [rows, slots], kept slots into which evicted slots may be merged.
    """

    score: Tensor
    mass: Tensor
    evicted: Tensor
    targets: Tensor


def pair_by_rank(plan: MergePlan) -> Tensor:
    """Pair evicted slots in rising order of score with target slots in falling order of mass.

    Each target has at most one partner. If there are more evicted slots than targets, the lowest scores are lost. The
    result, int64 [rows, slots], is the slot that is merged into each slot, or the slot itself.
    """
    sources = plan.score.masked_fill(~plan.evicted, torch.inf).argsort(dim=1, stable=True)
    targets = plan.mass.masked_fill(~plan.targets, -torch.inf).argsort(dim=1, descending=True, stable=True)
    source_count, target_count = (mask.sum(1, keepdim=True) for mask in (plan.evicted, plan.targets))
    rank = torch.arange(sources.shape[1], device=sources.device).expand_as(sources)
    first = (source_count - target_count).clamp(min=0)
    partners = sources.gather(1, (rank + first).clamp(max=sources.shape[1] - 1))
    partners = torch.where(rank < torch.minimum(source_count, target_count), partners, targets)
    return torch.empty_like(targets).scatter_(1, targets, partners)


def merge_fixed_budget(keys: Tensor, values: Tensor, plan: MergePlan) -> tuple[Tensor, Tensor]:
    """Average each pair of `pair_by_rank`, weighted by mass: keys and values of all slots, shaped and typed as given.

    The released code requires at least as many targets as evicted tokens; here the evicted tokens of lowest score are
    lost. Keys and values are [rows, slots, D].
    """
    other = pair_by_rank(plan)
    own = _share_mass(plan.mass, other)
    return _average(keys, other, own), _average(values, other, own)


def merge_multi_to_one(keys: Tensor, values: Tensor, plan: MergePlan) -> tuple[Tensor, Tensor]:
    """Average all evicted slots of a row with the target of best score, weighted by mass.

    Arguments and result are as in `merge_fixed_budget`; a row without a target does not change.
    """
    best = plan.score.masked_fill(~plan.targets, -torch.inf).argmax(1, keepdim=True)
    into = torch.zeros_like(plan.targets).scatter_(1, best, value=True) & plan.targets
    mass = plan.mass.masked_fill(~(plan.evicted | into), 0)
    total = mass.sum(1, keepdim=True)
    into &= total > 0
    weights = (mass / total.where(total > 0, 1))[:, None]

    def merge(x: Tensor) -> Tensor:
        return torch.where(into[..., None], (weights @ x.float()).to(x.dtype), x)

    return merge(keys), merge(values)


def merge_exactly(
    keys: Tensor, values: Tensor, bias: Tensor, plan: MergePlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the key of each pair's heavier slot, average the values, and add the missing score to a bias.

    The mean over queries of exp(score + bias - lse), with lse from before the merge, then equals the sum of both slots.
    `bias`, float32 [rows, slots], is the present bias of each slot's scores in nats; the new bias is returned last.
    Other arguments are as in `merge_fixed_budget`.
    """
    other = pair_by_rank(plan)
    own = _share_mass(plan.mass, other)
    slot = torch.arange(other.shape[1], device=other.device).expand_as(other)
    heavier = torch.where(own < 0.5, other, slot)
    missing = -torch.maximum(own, 1 - own).log()
    merged = keys.gather(1, heavier[..., None].expand_as(keys))
    return merged, _average(values, other, own), bias.gather(1, heavier) + missing


def _share_mass(mass: Tensor, other: Tensor) -> Tensor:
    """Return each slot's share of its pair's mass, float32 [rows, slots]; 1 without a partner."""
    added = mass.gather(1, other)
    alone = (other == torch.arange(other.shape[1], device=other.device)) | (added <= 0)
    return torch.where(alone, 1, mass / (mass + added))


def _average(x: Tensor, other: Tensor, own: Tensor) -> Tensor:
    """Average the slots of x [rows, slots, D] with their partners; `own` is the share of the slots."""
    partner = x.gather(1, other[..., None].expand_as(x))
    return torch.lerp(partner.float(), x.float(), own[..., None]).to(x.dtype)
