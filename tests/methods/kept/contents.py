"""Rules of methods that score slots by their contents, as loops in double precision."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.files import derive_seed
from tests.support.plain_cache import GROUP, HEADS, Head, Moment
from tests.support.plain_rules import Scorer, Scores, is_first, raise_to_top


def norms(at: Moment) -> Scores:
    """Short keys first."""
    return [[-float(key.norm()) for key in head.keys] for head in at.heads]


def differences(at: Moment) -> Scores:
    """Keys least similar to the mean of unit keys."""
    found = []
    for head in at.heads:
        mean = sum((key / key.norm() for key in head.keys), torch.zeros(())) / len(head.keys)
        found.append([-float(key @ mean / key.norm() / mean.norm()) for key in head.keys])
    return found


def find_leverage(at: Moment, head: int, keys: Tensor, sketch: int, seed: int) -> Tensor:
    """Ridge leverage of centred keys [n, D] under a random projection, by an explicit inverse."""
    generator = torch.Generator().manual_seed(derive_seed(f"{seed}:{at.layer}"))
    projection = torch.randn(HEADS, keys.shape[1], sketch, generator=generator)[head].double()
    x = (keys - keys.mean(0)) @ projection / sketch**0.5
    inverse = torch.linalg.inv(x.T @ x + 0.01 * torch.eye(sketch).double())
    return torch.stack([row @ inverse @ row for row in x])


def leverage(sketch: int) -> Scorer:
    """Leverage of all keys of a head before the rotation."""
    return lambda at: [
        find_leverage(at, number, at.unrotate(head.keys, head.tokens), sketch, 0).tolist()
        for number, head in enumerate(at.heads)
    ]


def standardise(rows: list[Tensor]) -> list[Tensor]:
    """Numbers with mean 0 and deviation 1 over all heads."""
    every = torch.cat(rows)
    return [(row - every.mean()) / every.std() for row in rows]


def attend_without_mask(at: Moment, head: int, part: slice, chunk: int, *, padded: bool) -> Tensor:
    """Attention that tokens of the segment receive in their chunk from raw queries, times norms, over three tokens."""
    count = len(at.asking)
    keys, values = (x[-count:][part] for x in (at.heads[head].keys, at.heads[head].values))
    received = torch.zeros(len(keys)).double()
    for query in at.queries[head][:, part]:
        for first in range(0, len(keys), chunk):
            q, k = query[first : first + chunk], keys[first : first + chunk]
            missing = chunk - len(k) if padded else 0
            q, k = (torch.cat((x, torch.zeros(missing, x.shape[1]).double())) for x in (q, k))
            sums = (q @ k.T).softmax(-1).sum(0)
            received[first : first + chunk] += sums[: len(sums) - missing] / GROUP
    weighted = [0.0, *(received * values.norm(dim=1)).tolist(), 0.0]
    return torch.tensor([sum(weighted[i : i + 3]) / 3 for i in range(len(keys))]).double()


def note(at: Moment, part: slice, rows: Sequence[Tensor]) -> None:
    """Write numbers of some tokens of the segment."""
    for head, row in zip(at.heads, rows, strict=True):
        places = list(range(len(head.tokens) - len(at.asking), len(head.tokens)))[part]
        for place, number in zip(places, row.tolist(), strict=True):
            head.numbers[place] = number


def noncausal(chunk: int) -> Scorer:
    """Attention without a mask within the segment of a token, standardised there."""

    def score(at: Moment) -> Scores:
        padded = at.segment.causal
        rows = [attend_without_mask(at, head, slice(None), chunk, padded=padded) for head in range(HEADS)]
        note(at, slice(None), standardise(rows))
        return [head.numbers for head in at.heads]

    return score


def compactor(chunk: int, mix: float, leading: int, trailing: int, sketch: int) -> Scorer:
    """Leverage and attention without a mask of the tokens between both ends of the segment."""

    def score(at: Moment) -> Scores:
        part = slice(max(0, leading - (at.asking[0] - at.begin)), len(at.asking) - trailing)
        if part.start < part.stop:
            places = at.asking[part]
            own = [head.keys[-len(at.asking) :][part] for head in at.heads]
            levers = [
                find_leverage(at, head, at.unrotate(keys, places), sketch, 0) for head, keys in enumerate(own)
            ]
            padded = at.segment.causal
            attended = [attend_without_mask(at, head, part, chunk, padded=padded) for head in range(HEADS)]
            pairs = zip(standardise(levers), standardise(attended), strict=True)
            note(at, part, [mix * one + other for one, other in pairs])
        ends = [at.begin + leading, at.segment.end - trailing]
        return [
            raise_to_top(head.numbers, [not ends[0] <= token < ends[1] for token in head.tokens])
            for head in at.heads
        ]

    return score


def cur(leading: int, block: int) -> Scorer:
    """Product of squared norms, each relative to its block of neighbours."""

    def score(at: Moment) -> Scores:
        found = []
        for head in at.heads:
            lengths = [[float(x @ x) for x in part] for part in (head.keys, head.values)]
            blocks = [
                [row[i - i % block : i - i % block + block] for i in range(len(row))] for row in lengths
            ]
            products = [
                k / sum(ks) * v / sum(vs) for k, v, ks, vs in zip(*lengths, *blocks, strict=True)
            ]  # fmt: skip
            found.append(raise_to_top(products, is_first(at, head, leading)))
        return found

    return score


def lagkv(lag: int | None, leading: int) -> Scorer:
    """Rank of a token in its part by its deviation on the scale of the next part, which must be complete."""

    def score(at: Moment) -> Scores:
        begin = at.begin + leading
        complete = at.segment.index if lag is None else (at.segment.end - begin) // lag - 1
        found = []
        for head in at.heads:
            if lag is None:
                ends = [segment.end for segment in at.spec.segments]
                parts = [sum(token >= end for end in ends) for token in head.tokens]
            else:
                parts = [(token - begin) // lag for token in head.tokens]
            if complete < 1:
                scores = [float(token) for token in head.tokens]
            else:
                scores = [1 + token * 1e-7 * (lag is not None) for token in head.tokens]
                for part in range(complete):
                    own, following = ([i for i, p in enumerate(parts) if p == n] for n in (part, part + 1))
                    for place, rank in zip(own, rank_part(head, own, following), strict=True):
                        scores[place] = rank
            found.append(raise_to_top(scores, is_first(at, head, leading)))
        return found

    return score


def rank_part(head: Head, own: list[int], following: list[int]) -> list[float]:
    """Ranks from 0 of the slots of a part, divided by their number."""
    if not own:
        return []
    weights = torch.zeros(len(own)).double()
    for x in (head.keys, head.values):
        deviations = torch.zeros(len(own)).double()
        if len(following) > 1:
            low, high = x[following].amin(0), x[following].amax(0)
            spread = torch.where(high > low, high - low, torch.inf)
            deviations = ((x[own] - low) / spread).std(1)
        weights += deviations.softmax(0) / 2
    order = sorted(range(len(own)), key=lambda i: (float(weights[i]), i))
    return [order.index(i) / len(own) for i in range(len(own))]
