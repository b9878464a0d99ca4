"""LineAR against a slow reference over whole generations."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.linear_ar import LineAR
from kvbench.methods.shared.capacities import share_evenly
from tests.support.engine import D, receive, tokens_of, watch

SPEC = ModelSpec("lines", 2, 3, D, next_token(3, [5] * 7 + [4]), logit_scale=0.7)


def lines_kept(
    q: Tensor, k: Tensor, room: int, min_tokens: int, given_settings: dict[str, Any]
) -> list[list[int]]:
    """Positions that one head holds after every segment, by the paper's words: q [query heads, n, D], k [n, D]."""
    anchors, recent = given_settings["anchors"], given_settings["recent"]
    image = [list(range(at.start, at.end)) for at in SPEC.segments[1:-1]]
    condition = list(range(SPEC.segments[0].end))
    held, after = list(condition), [list(condition)]
    for number, line in enumerate(image):
        held = held + line
        if len(held) > min_tokens:
            newest = [token for row in image[max(0, number + 1 - recent) : number + 1] for token in row]
            count = (min_tokens - len(condition)) * 2 // 3
            newest = newest[-count:] if count else []
            half = (min_tokens - len(condition) - len(newest)) // 2
            first = [token for row in image[:anchors] for token in row][:half]
            queries = line[-given_settings["window"] :] if given_settings["window"] else line
            worth = receive(q, k, held, queries, given_settings["attention"], SPEC.logit_scale)
            while len(held) > room:
                middle = [token for token in held if token not in {*condition, *first, *newest}]
                held.remove(min(middle, key=lambda token: (worth[token], -token)))
        after.append(list(held))
    return after


@given(
    anchors=st.integers(0, 3),
    recent=st.integers(1, 3),
    window=st.sampled_from((None, 1, 3, 9)),
    attention=st.sampled_from(("prob", "logit")),
    budget=st.sampled_from(("0.2", "0.31", "0.45", "0.6", "0.77")),
    groups=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25)
def test_what_is_kept_is_what_the_paper_says(
    budget: str, groups: int, seed: int, **given_settings: Any
) -> None:
    inputs = tokens_of(SPEC, 2, seed, groups)
    cache, seen, _ = watch(LineAR(sinks=1, **given_settings), SPEC, inputs, budget)
    rooms = share_evenly(cache.method.budget.tokens, SPEC)
    for layer in range(SPEC.layers):
        q, k = (torch.cat([segment[layer][part] for segment in inputs], 2) for part in (0, 1))
        each = rooms[layer]
        for sequence in range(2):
            for head in range(SPEC.heads):
                heads = q[sequence, head * groups : (head + 1) * groups]
                room = each if isinstance(each, int) else each[head]
                min_tokens = each if isinstance(each, int) else min(each)
                expected = lines_kept(heads, k[sequence, head], room, min_tokens, given_settings)
                row = sequence * SPEC.heads + head
                found = [asked.ids(slice(row, row + 1))[0] for asked in seen if asked.layer == layer]
                assert found == expected
