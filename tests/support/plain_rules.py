"""Rules of methods as loops over the slots of a head, in double precision and without the code of methods."""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from kvbench.methods.shared.draws import draw_uniform
from tests.support.plain_cache import GROUP, HEADS, Head, Moment, Rule, best

Scores = list[list[float]]
"""Scores of the slots of each head."""
Scorer = Callable[[Moment], Scores]


def keep_best(score: Scorer) -> Rule:
    """Each head keeps its best slots."""
    return lambda at: [best(row, room) for row, room in zip(score(at), at.room, strict=True)]


def is_first(at: Moment, head: Head, count: int) -> list[bool]:
    """Which slots hold the first tokens after the padding."""
    return [token < at.begin + count for token in head.tokens]


def raise_to_top(scores: Sequence[float], chosen: Sequence[bool]) -> list[float]:
    """Scores with infinity for some slots."""
    return [inf if one else score for score, one in zip(scores, chosen, strict=True)]


def tova(at: Moment) -> Scores:
    """Attention of the newest query, a mean over all heads that have the token; it stays itself."""
    sums: dict[int, float] = {}
    for number, head in enumerate(at.heads):
        row = at.attention(number)[:, -1].mean(0).tolist()
        for token, value in zip(head.tokens, row, strict=True):
            sums[token] = sums.get(token, 0) + value / HEADS
    newest = at.asking[-1]
    return [[inf if token == newest else sums[token] for token in head.tokens] for head in at.heads]


def attend_from_window(at: Moment, head: int, window: int, *, outside: bool = False) -> Tensor:
    """Scores [query heads, window, slots] of the newest queries, or of the best query head outside the window."""
    count = min(window, len(at.asking))
    scores = at.logits(head)[:, -count:]
    if outside:
        scores = scores.amax(0, keepdim=True)
        scores[..., -count:] = -torch.inf
    return scores


def pool(scores: Sequence[float], size: int, kind: str = "max") -> list[float]:
    """Largest score of some neighbours, or the mean with 0 beyond the ends."""
    half = size // 2
    near = [scores[max(0, i - half) : i + half + 1] for i in range(len(scores))]
    return [max(some) if kind == "max" else sum(some) / size for some in near]


def snapkv(window: int, kernel: int = 3, kind: str = "max", *, outside: bool = False) -> Scorer:
    """Mean attention of the newest queries, of which the largest or the mean of some neighbours; the window stays."""
    blank = -inf if kind == "max" else 0.0

    def score(at: Moment) -> Scores:
        count, found = min(window, len(at.asking)), []
        for number in range(HEADS):
            received = (
                attend_from_window(at, number, window, outside=outside).softmax(-1).mean((0, 1)).tolist()
            )
            found.append(pool([*received[:-count], *[blank] * count], kernel, kind)[:-count] + [inf] * count)
        return found

    return score


def dropkv(window: int, kernel: int) -> Scorer:
    """How far the outputs of the newest queries move without a token, squared; each is left out once."""

    def score(at: Moment) -> Scores:
        count, found = min(window, len(at.asking)), []
        for number, head in enumerate(at.heads):
            scores, slots = attend_from_window(at, number, window), range(len(head.tokens))
            whole = scores.softmax(-1) @ head.values
            moved = []
            for slot in slots:
                rest = [other for other in slots if other != slot]
                alone = scores[..., rest].softmax(-1) @ head.values[rest]
                moved.append(float((alone - whole).square().sum()) / GROUP)
            found.append(pool([*moved[:-count], *[-inf] * count], kernel)[:-count] + [inf] * count)
        return found

    return score


def rkv(window: int, mix: float, threshold: float, protected: int = 1) -> Scorer:
    """Attention outside the window minus the redundancy of keys, whose latest near copies do not count."""

    def score(at: Moment) -> Scores:
        count, found = min(window, len(at.asking)), []
        for number, head in enumerate(at.heads):
            scores = attend_from_window(at, number, window, outside=True)
            seen = len(head.tokens) > count
            received = scores.softmax(-1).mean((0, 1)).tolist() if seen else [0.0] * count
            unit = head.keys / head.keys.norm(dim=1, keepdim=True)
            alike = (unit @ unit.T).fill_diagonal_(0)
            for i, row in enumerate(alike.tolist()):
                near = [j for j, cosine in enumerate(row) if cosine > threshold]
                alike[i, near[max(0, len(near) - protected) :]] = 0
            redundant = alike.mean(0).softmax(0).tolist()
            pairs = zip(pool(received, 3), redundant, strict=True)
            mixed = [mix * one - (1 - mix) * other for one, other in pairs]
            found.append(mixed[:-count] + [inf] * count)
        return found

    return score


def h2o(recent: float, observed: int | None = None, *, per_query: bool = False) -> Scorer:
    """Attention since a token came, summed over queries or their mean; the latest tokens stay."""

    def score(at: Moment) -> Scores:
        queries, found = len(at.asking), []
        some = min(observed or queries, queries)
        latest = at.segment.end - int(recent * min(at.room))
        for number, head in enumerate(at.heads):
            asking = [i * queries // some for i in range(some)]
            received = (at.attention(number)[:, asking].mean(1) * queries).mean(0).tolist()
            head.numbers = [one + more for one, more in zip(head.numbers, received, strict=True)]
            begins = [max(s.start for s in at.spec.segments if s.start <= token) for token in head.tokens]
            asked = [at.segment.end - begin if per_query else 1 for begin in begins]  # queries of maps
            values = [one / count for one, count in zip(head.numbers, asked, strict=True)]
            found.append(raise_to_top(values, [token >= latest for token in head.tokens]))
        return found

    return score


def random(at: Moment) -> Scores:
    """A number per token, drawn by prompt, layer, segment and head."""
    name = f"0:{at.sequence}:{at.layer}:{at.segment.index}"
    count = len(at.asking)
    for number, head in enumerate(at.heads):
        if at.spec.writes_text:
            drawn = draw_uniform(f"{name}:{number}", (count,))
        else:
            drawn = draw_uniform(name, (HEADS, count))[number]
        head.numbers[-count:] = drawn.tolist()
    return [head.numbers for head in at.heads]


def latest(leading: int, sinks: int = 0) -> Rule:
    """The first segments, the first tokens after them, and the latest tokens."""

    def keep(at: Moment) -> list[list[int]]:
        found = []
        for head, room in zip(at.heads, at.room, strict=True):
            begin = at.spec.leading_tokens(sinks) or at.begin
            firsts = [token < begin + leading for token in head.tokens]
            ages = [inf if one else token for token, one in zip(head.tokens, firsts, strict=True)]
            found.append(best(ages, room))
        return found

    return keep


def earliest(at: Moment) -> Scores:
    """The earliest tokens."""
    return [[-float(token) for token in head.tokens] for head in at.heads]


def compete(score: Scorer, safeguard: float) -> Rule:
    """Each head keeps its best slots for a share of its room, at least one; the rest goes to the best of the layer."""

    def keep(at: Moment) -> list[list[int]]:
        return share_slots(score(at), at.room, safeguard)

    return keep


def share_slots(rows: Scores, room: Sequence[int], safeguard: float) -> list[list[int]]:
    """Slots of each head when heads compete for their joint room."""
    safe = {
        (number, slot)
        for number, (row, own) in enumerate(zip(rows, room, strict=True))
        for slot in best(row, max(1, int(safeguard * own)))
    }
    stays = {(n, slot) for n, row in enumerate(rows) for slot, value in enumerate(row) if value == inf}
    every = [(n, slot) for n, row in enumerate(rows) for slot in range(len(row))]
    order = sorted(every, key=lambda one: (one not in stays, one not in safe, -rows[one[0]][one[1]], one))
    chosen = order[: sum(room)]
    return [sorted(slot for n, slot in chosen if n == number) for number in range(len(rows))]


def project(at: Moment, head: int, order: int) -> list[float]:
    """Norms of the contributions of a head's values to the output, a mean over its query heads."""
    weights = at.projection.unflatten(1, (HEADS, GROUP, -1))[:, head]
    return [
        sum(float((weights[:, g] @ value).norm(p=order)) for g in range(GROUP)) / GROUP
        for value in at.heads[head].values
    ]


def critical(score: Scorer, first: float, epsilon: float, safeguard: float | None = None) -> Rule:
    """A share of a head's slots by score, the others by the score times the norm of what they add to the output."""

    def keep(at: Moment) -> list[list[int]]:
        rows, found = score(at), []
        if safeguard is None:
            counts = [min(room, len(row)) for room, row in zip(at.room, rows, strict=True)]
        else:
            counts = [len(slots) for slots in share_slots(rows, at.room, safeguard)]
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            safe = 0 if safeguard is None else max(1, int(safeguard * at.room[number]))
            by_score = max(int(first * count), 1 if first else 0, row.count(inf), safe)
            certain = best(row, min(by_score, count))
            products = [
                (value + epsilon) * norm for value, norm in zip(row, project(at, number, 1), strict=True)
            ]
            found.append(best([inf if i in certain else x for i, x in enumerate(products)], count))
        return found

    return keep


def chunkkv(score: Scorer, chunk: int) -> Rule:
    """Chunks of highest mean score over heads, in all heads; chunks begin anew with each segment."""

    def keep(at: Moment) -> list[list[int]]:
        rows, tokens = score(at), at.heads[0].tokens
        assert all(head.tokens == tokens for head in at.heads)
        means = [sum(row[i] for row in rows) / HEADS for i in range(len(tokens))]
        chunks = []
        for token in tokens:
            own = max(segment.start for segment in at.spec.segments if segment.start <= token)
            chunks.append((own, (token - max(own, at.begin)) // chunk))
        free = [i for i, mean in enumerate(means) if mean < inf]
        value = {}
        for name in {chunks[i] for i in free}:
            members = [means[i] for i in free if chunks[i] == name]
            value[name] = sum(members) / len(members)
        order = [i for i in range(len(tokens)) if i not in free]
        order += sorted(free, key=lambda i: (-value[chunks[i]], chunks[i], -means[i], i))
        return [sorted(order[:room]) for room in at.room]

    return keep
