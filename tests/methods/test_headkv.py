"""HeadKV against a slow reference over whole generations: heads sorted, budgets matched, history left in two strata."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.headkv import HeadKV
from kvbench.methods.shared.capacities import share_evenly
from tests.support.engine import D, prepared, receive, tokens_of, watch

CONDITION, LINE = 3, 5
SPEC = ModelSpec("lines", 3, 2, D, next_token(CONDITION, [LINE] * 8 + [4]), logit_scale=0.7)
ALL = SPEC.cached_length
Rooms = dict[tuple[int, int], int]


def hand_out(local: dict[tuple[int, int], bool], tokens: int, little: int, known: bool) -> Rooms:
    """Rooms of all heads, a token at a time: little in local heads, then global ones in turn, then local ones.

    Until all heads are known to be local or not, a turn that does not reach all heads is not begun.
    """
    rooms = {head: little if is_local else 0 for head, is_local in local.items()}
    left = tokens - sum(rooms.values())
    for kind in (False, True):
        heads = [head for head, is_local in local.items() if is_local == kind]
        while heads and rooms[heads[0]] < ALL:
            if left < len(heads) and not (known and left):
                return rooms
            for head in heads[:left]:
                rooms[head] += 1
            left -= min(left, len(heads))
    return rooms


def walk_back(worth: dict[int, float], threshold: float) -> int:
    """Tokens from the newest backwards that together receive the threshold."""
    total = 0.0
    for needed, token in enumerate(sorted(worth, reverse=True), start=1):
        total += worth[token]
        if total >= threshold:
            return needed
    return len(worth)


def drop_lowest(tokens: list[int], worth: dict[int, float], count: int) -> list[int]:
    """What is left of some tokens without those of lowest worth."""
    gone = sorted(tokens, key=lambda token: (worth[token], -token))[:count]
    return [token for token in tokens if token not in gone]


def compress(
    held: list[int], end: int, room: int, local: bool, worth: dict[int, float], given_settings: dict[str, Any]
) -> list[int]:
    """What one head keeps of the tokens it holds."""
    condition, image = held[:CONDITION], held[CONDITION:]
    spare = room - CONDITION
    if local:
        return condition + [token for token in image if token >= end - spare]
    newest = min(given_settings["recent"] * LINE, spare * 2 // 3)
    recent = [token for token in image if token >= end - newest]
    history = [token for token in image if token < end - newest]
    leaving = max(0, len(held) - room)
    cut = int(len(history) * given_settings["ratio"])
    older, newer = history[:cut], history[cut:]
    share = leaving // 2
    if given_settings["leave"] == "proportion":
        share = leaving * cut // max(len(history), 1)
    share = max(min(share, len(older)), leaving - len(newer))
    return condition + drop_lowest(older, worth, share) + drop_lowest(newer, worth, leaving - share) + recent


Rows = dict[tuple[int, int], Any]
"""Something of each (sequence, head) of a layer."""


def sort_heads(newest: Rows, given_settings: dict[str, Any]) -> Rows:
    """Which rows are local, by what tokens receive from the newest query."""
    window = given_settings["local_window"] or given_settings["recent"] * LINE
    alone = {row: walk_back(worth, given_settings["threshold"]) < window for row, worth in newest.items()}
    if given_settings["len_rows"] == "per_row":
        return alone
    return {(sequence, head): alone[0, head] and alone[1, head] for sequence, head in alone}


def merge_branches(worth: Rows, rows: str) -> Rows:
    """What tokens are worth to those who decide."""
    if rows == "per_row":
        return worth
    united = {}
    for sequence, head in worth:
        one, other = worth[0, head], worth[1, head]
        mean = {token: (one[token] + other[token]) / 2 for token in one}
        united[sequence, head] = mean if rows == "mean" else one
    return united


def simulate(
    inputs: list[list[tuple[Tensor, ...]]], groups: int, budget: Budget, given_settings: dict[str, Any]
) -> Iterator[list[list[int]]]:
    """What each row of one prompt's two sequences holds, layer by layer after every segment."""
    heads, buffer = range(SPEC.heads), given_settings["buffer"]
    little = min(CONDITION + (given_settings["recent"] + buffer - 1) * LINE, budget.head_tokens)
    even = [room if isinstance(room, tuple) else (room,) * 2 for room in share_evenly(budget.tokens, SPEC)]
    cached = SPEC.segments[:-1]
    longest = min(given_settings["group_at"], budget.head_tokens)
    first = next(at.index for at in SPEC.segments if at.end > longest)
    local: dict[int, Rows] = {}
    held: list[Rows] = [{row: [] for row in product(range(2), heads)} for _ in range(SPEC.layers)]
    for at, layer in product(cached, range(SPEC.layers)):
        now = list(range(at.start, at.end))
        q, k = (torch.cat([segment[layer][part] for segment in inputs], 2) for part in (0, 1))
        worth, newest = {}, {}
        for row in held[layer]:
            held[layer][row] = held[layer][row] + now
            sequence, head = row
            own = (q[sequence, head * groups : (head + 1) * groups], k[row], held[layer][row])
            worth[row] = receive(*own, now, given_settings["attention"], SPEC.logit_scale)
            newest[row] = receive(*own, now[-1:], "prob", SPEC.logit_scale)
        if at.index == first:
            local[layer] = sort_heads(newest, given_settings)
        if at.index >= first and (at.index - first) % buffer == 0:
            arriving = sum(later.length for later in cached[at.index + 1 : at.index + buffer])
            worth = merge_branches(worth, given_settings["branch_mode"])
            for (sequence, head), kind in local[layer].items():
                room = min(little, even[layer][head]) if kind else even[layer][head]
                if given_settings["match_mean"]:
                    kinds = {
                        (other, one): other in local and local[other][sequence, one]
                        for other, one in product(range(SPEC.layers), heads)
                    }
                    room = hand_out(kinds, budget.tokens, little, len(local) == SPEC.layers)[layer, head]
                row = (sequence, head)
                kept = compress(held[layer][row], at.end, room - arriving, kind, worth[row], given_settings)
                held[layer][row] = kept
        yield list(held[layer].values())


MIXED = {"threshold": 0.5, "local_window": 9, "group_at": 17}
SOME: dict[str, Any] = {
    "group_at": 8, "threshold": 0.5, "recent": 1, "local_window": 3, "ratio": 0.3, "buffer": 1, "leave": "half",
    "match_mean": True, "attention": "prob", "len_rows": "per_row", "branch_mode": "per_row",
}  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        ("0.45", {}),
        ("0.45", {"leave": "proportion"}),
        ("0.6", MIXED),
        ("0.83", MIXED | {"local_window": 14, "len_rows": "shared", "branch_mode": "mean"}),
        ("0.6", MIXED | {"match_mean": False, "buffer": 2}),
        ("0.31", {"attention": "logit", "ratio": 0.0, "recent": 2, "local_window": None}),
        ("0.6", {"ratio": 1.0, "recent": 3, "buffer": 3, "len_rows": "shared", "branch_mode": "conditional"}),
        ("0.83", {"group_at": 100, "threshold": 0.9, "local_window": 14}),
    ],
)
def test_what_is_kept_is_what_the_paper_says(budget: str, chosen: dict[str, Any]) -> None:
    inputs, capacity = tokens_of(SPEC, 2, groups=2), Budget.parse(budget, SPEC)
    cache, seen, _ = watch(HeadKV(sinks=1, **(SOME | chosen)), SPEC, inputs, budget)
    assert [asked.ids() for asked in seen] == list(simulate(inputs, 2, capacity, SOME | chosen))
    assert cache.ledger.peak_tokens <= capacity.capacity


@pytest.mark.parametrize(("budget", "first"), [(145, 5), (97, 5), (73, 4), (30, 2)])
def test_heads_of_llamagen_are_sorted_at_the_fifth_line_or_as_soon_as_the_budget_is_full(
    budget: int, first: int
) -> None:
    """The class and five lines of 24 are the first that exceed 100 tokens (A.2)."""
    spec = ModelSpec("llamagen_xl", 36, 20, 64, next_token(1, [24] * 23 + [23]))
    method = prepared(HeadKV(sinks=1), spec, budget)
    assert method._first == first
    assert method._recent == 48
