"""SSD against a slow reference: the classes' calibration, their capacities, and what each class keeps."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.ssd import SSD, DistantAttention, share_classes
from tests.support.engine import D, open_cache, run, tokens_of, watch

CONDITION, LINE = 3, 5
SPEC = ModelSpec("image", 2, 2, D, next_token(CONDITION, [LINE] * 5 + [4]), 2, 0.7, group=2, line=LINE)


def attend(inputs: Any, layer: int, sequence: int, head: int, query: int, held: list[int]) -> Tensor:
    """Attention of a query to the held tokens before it and to itself, a mean over the heads that share the keys."""
    q, k = (torch.cat([segment[layer][n] for segment in inputs], 2)[sequence].double() for n in (0, 1))
    seen = [token for token in held if token <= query]
    heads = q[head * 2 : head * 2 + 2, query]
    attention = (heads @ k[head, seen].T * SPEC.logit_scale).softmax(-1).mean(0)
    return torch.zeros(SPEC.segments[-1].end, dtype=torch.float64).index_put((torch.tensor(seen),), attention)


def test_distant_attention_is_what_the_neighbourhood_does_not_receive() -> None:
    inputs, observer = tokens_of(SPEC, 4, 1, groups=2), DistantAttention(near=2, above=1)
    run(open_cache(observer, SPEC), inputs)
    found = observer.average()["distant"]
    end = SPEC.segments[-1].end
    for layer in range(SPEC.layers):
        for head in range(SPEC.heads):
            shares = []
            for prompt in range(2):  # those with a condition come first
                for query in range(CONDITION, end):
                    received = attend(inputs, layer, prompt, head, query, [*range(end)])
                    near = {query - x for x in (0, 1, 2, LINE - 1, LINE, LINE + 1)}
                    far = [t for t in range(CONDITION, query + 1) if t not in near]
                    shares.append(float(received[far].sum() / received[CONDITION:].sum()))
            assert found[layer, head].item() == pytest.approx(sum(shares) / len(shares), abs=1e-5)


def artifact(*spatial: bool) -> Artifact:
    """Heads in order, the spatial ones of a small share of distant attention."""
    distant = torch.tensor([0.1 if one else 0.9 for one in spatial], dtype=torch.float64)
    return Artifact("distant_attention", {"distant": distant.view(SPEC.layers, SPEC.heads)})


@pytest.mark.parametrize(("accumulate", "recent"), [("all", 2), ("newest", 2), ("all", 100)])
def test_each_class_keeps_what_it_should(accumulate: Any, recent: int) -> None:
    """The newest tokens take two thirds of a semantic head at most."""
    inputs = tokens_of(SPEC, 2, groups=2)
    method = SSD(sinks=1, window=6, recent=recent, accumulate=accumulate)
    budget = 14
    asked = watch(method, SPEC, inputs, budget, artifact(True, False, False, True)).asked
    rooms = {True: CONDITION + 6, False: 2 * budget - CONDITION - 6}
    held = {(layer, row): [*range(CONDITION)] for layer in range(2) for row in range(4)}
    sums = {place: torch.zeros(SPEC.segments[-1].end, dtype=torch.float64) for place in held}
    for one in asked[SPEC.layers :]:
        segment = SPEC.segments[one.scale]
        for row in range(4):
            place, (sequence, head) = (one.layer, row), divmod(row, 2)
            tokens = held[place] + [*range(segment.start, segment.end)]
            received = [
                attend(inputs, one.layer, sequence, head, query, tokens)
                for query in range(segment.start, segment.end)
            ]
            sums[place] = torch.stack(received).sum(0) + (sums[place] if accumulate == "all" else 0)
            spatial = (one.layer == 0) == (head == 0)
            image = tokens[CONDITION:]
            spare = rooms[spatial] - CONDITION
            newest = segment.end - min(recent, 2 * spare // 3)
            worth = {t: (t if spatial or t >= newest else -1, float(sums[place][t])) for t in image}
            best = sorted(image, key=lambda t: worth[t])[-spare:]
            held[place] = tokens[:CONDITION] + sorted(best)
            assert one.ids()[row] == held[place]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
@settings(max_examples=100, deadline=None)
def test_capacities_use_the_whole_budget(layers: int, heads: int, data: st.DataObject) -> None:
    small = torch.tensor(data.draw(st.lists(st.booleans(), min_size=layers * heads, max_size=layers * heads)))
    full = data.draw(st.integers(4, 40))
    tokens = data.draw(st.integers(layers * heads, layers * heads * full))
    capacity = data.draw(st.integers(1, tokens // (layers * heads)))
    shares = share_classes(small.view(layers, heads), capacity, tokens, full)
    assert shares.sum() == tokens
    assert shares.max() <= full
    assert shares.min() >= capacity
    ours, others = shares.flatten()[small], shares.flatten()[~small]
    for each in (ours, others):
        assert len(each) == 0 or each.max() - each.min() <= 1
    if len(ours) and len(others) and others.min() < full:
        assert (ours == capacity).all()
