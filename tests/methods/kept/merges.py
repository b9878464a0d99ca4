"""Rules of methods that merge evicted slots into slots that stay, as loops in double precision."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.methods.shared.draws import draw_uniform
from tests.support.plain_cache import HEADS, Head, Moment, Rule, best
from tests.support.plain_rules import Scorer, share_slots


def pair(head: Head, kept: Sequence[int], keys: Tensor) -> dict[int, tuple[int, float]]:
    """The slot that stays with the most similar key, and the cosine, for each slot that leaves."""
    found = {}
    for slot in sorted(set(range(len(head.tokens))) - set(kept)):
        cosines = [float(torch.cosine_similarity(keys[slot], keys[other], dim=0)) for other in kept]
        place = max(range(len(kept)), key=cosines.__getitem__)
        found[slot] = kept[place], cosines[place]
    return found


def blend(x: Tensor, target: int, sources: Sequence[tuple[int, float]], how: str) -> Tensor:
    """New contents of a slot that stays (LOOK-M, Eq. 10 to 12)."""
    if how == "pivot":
        parts = [(x[slot] + x[target]) / 2 for slot, _ in sources]
    else:
        parts = [x[slot] * (cosine if how == "weighted" else 1) for slot, cosine in sources]
    return sum(parts, x[target]) / (1 + len(parts))


def merge(head: Head, pairs: dict[int, tuple[int, float]], how: str, *, renormalise: bool = False) -> None:
    """Merge slots into their targets."""
    keys, values = head.keys.clone(), head.values.clone()
    for target in {target for target, _ in pairs.values()}:
        sources = [(slot, cosine) for slot, (into, cosine) in pairs.items() if into == target]
        keys[target] = blend(head.keys, target, sources, how)
        if renormalise:
            keys[target] *= head.keys[target].norm() / keys[target].norm()
        values[target] = blend(head.values, target, sources, how)
    head.keys, head.values = keys, values


def lookm(score: Scorer, how: str, *, renormalise: bool = False, unrotated: bool = False) -> Rule:
    """Each slot that leaves merges into the most similar one that stays."""

    def keep(at: Moment) -> list[list[int]]:
        found = [best(row, room) for row, room in zip(score(at), at.room, strict=True)]
        for head, kept in zip(at.heads, found, strict=True):
            compared = at.unrotate(head.keys, head.tokens) if unrotated else head.keys
            merge(head, pair(head, kept, compared), how, renormalise=renormalise)
        return found

    return keep


def d2o(score: Scorer, alpha: float, beta: float) -> Rule:
    """The i-th slots to leave of all heads merge if their mean cosine reaches a threshold that moves."""

    def keep(at: Moment) -> list[list[int]]:
        found = [best(row, room) for row, room in zip(score(at), at.room, strict=True)]
        pairs = [pair(head, kept, head.keys) for head, kept in zip(at.heads, found, strict=True)]
        cosines = [[cosine for _, cosine in of.values()] for of in pairs]
        if every := [cosine for row in cosines for cosine in row]:
            mean = sum(every) / len(every)
            before = at.memory.get("threshold")
            at.memory["threshold"] = mean if before is None else alpha * before + beta * mean
        for head, of in zip(at.heads, pairs, strict=True):
            merged = {}
            for rank, slot in enumerate(of):
                alike = [row[rank] for row in cosines if len(row) > rank]
                if sum(alike) / len(alike) >= at.memory["threshold"] - 1e-9:
                    merged[slot] = of[slot]
            merge(head, merged, "weighted")
        return found

    return keep


def merging_press(score: Scorer, threshold: float) -> Rule:
    """Values merge by cosine times their share of both norms; keys stay."""

    def keep(at: Moment) -> list[list[int]]:
        found = [best(row, room) for row, room in zip(score(at), at.room, strict=True)]
        for head, kept in zip(at.heads, found, strict=True):
            values, weights = head.values.clone(), [1.0] * len(head.tokens)
            for slot, (target, cosine) in pair(head, kept, head.keys).items():
                if cosine >= threshold:
                    norms = [float(head.values[i].norm()) for i in (slot, target)]
                    weight = max(cosine, 0) * norms[0] / sum(norms)
                    values[target] += weight * head.values[slot]
                    weights[target] += weight
            head.values = values / torch.tensor(weights).double()[:, None]
        return found

    return keep


def cam(score: Scorer, windows: int, sample: str, safeguard: float | None = None) -> Rule:
    """Values are added to the next slots that stay, with a probability by attention since the prompt.

    A head adds at most as many slots as the segment has tokens, the best of those that leave. A head that loses a
    competition drops more.
    """

    def keep(at: Moment) -> list[list[int]]:
        for number, head in enumerate(at.heads):
            if at.segment.index or not at.segment.causal:
                received = at.attention(number).mean(0).sum(0).tolist()
                head.numbers = [one + more for one, more in zip(head.numbers, received, strict=True)]
        rows = score(at)
        if safeguard is None:
            found = [best(row, room) for row, room in zip(rows, at.room, strict=True)]
        else:
            found = share_slots(rows, at.room, safeguard)
        for number, (head, row, kept) in enumerate(zip(at.heads, rows, found, strict=True)):
            name = f"0:{at.sequence}:{at.layer}:{at.segment.index}"
            if at.spec.writes_text:
                drawn = draw_uniform(f"{name}:{number}", (at.segment.end,))
            else:
                drawn = draw_uniform(name, (HEADS, at.segment.end))[number]
            leaves = sorted(set(range(len(row))) - set(kept), key=lambda i: (-row[i], -i))
            values = head.values.clone()
            for slot in leaves[: at.segment.length]:
                window = [i for i in kept if i > slot][:windows]
                mean = sum(head.numbers[i] for i in window) / max(len(window), 1)
                chance = min(head.numbers[slot] / mean, 1) if mean else float(head.numbers[slot] > 0)
                if sample == "bernoulli":
                    chance = float(drawn[head.tokens[slot] - at.begin] < chance)
                for target in window:
                    values[target] += chance / len(window) * head.values[slot]
            head.values = values
        return found

    return keep
