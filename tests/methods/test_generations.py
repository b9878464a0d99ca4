"""LazyEviction, LineAR and SSD over whole generations: a port of LazyEviction's program, and slow references."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.lazy_eviction import LazyEviction, measure_importance
from kvbench.methods.linear_ar import LineAR
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import share_evenly
from kvbench.methods.shared.view import View
from kvbench.methods.ssd import SSD, DistantAttention, share_classes
from tests.support.engine import D, open_cache, receive, run, tokens_of, watch
from tests.support.goldens import load_golden

CASES = {"a": (7, 16, 48, 0.02, 0), "b": (10, 20, 50, 0.01, 1)}
"""Tokens of the prompt, window, slots, alpha, segments that stay."""


def inputs_of(case: str) -> tuple[ModelSpec, list[list[tuple[Tensor, ...]]]]:
    """Keys that are unit vectors, so that a query's channels are its logits."""
    prompt, window, *_ = CASES[case]
    logits = load_golden(f"ld_lazyeviction_{case}")["logits"].float().transpose(0, 1)
    heads, steps, tokens = logits.shape
    segments = next_token(prompt, [window] * (steps // window) + [1])
    spec = ModelSpec("golden", 1, heads, tokens + 1, segments, branches=1)
    q = torch.zeros(1, heads, tokens + 1, tokens + 1)
    q[0, :, prompt:-1, :-1] = logits
    k = torch.eye(tokens + 1).expand(1, heads, -1, -1)
    lengths = [segment.length for segment in segments]
    parts = zip(q.split(lengths, 2), k.split(lengths, 2), strict=True)
    return spec, [[(one, other, other)] for one, other in parts]


@pytest.mark.parametrize("case", CASES)
def test_a_generation_is_that_of_the_program(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g, (prompt, window, budget, alpha, sinks) = load_golden(f"ld_lazyeviction_{case}"), CASES[case]
    spec, inputs = inputs_of(case)
    method = LazyEviction(alpha=alpha, sinks=sinks)
    seen, inner = [], method.score

    def score(view: View) -> Tensor:
        seen.append((view.segment.end - prompt, view.position.clone(), view.state.clone()))
        return inner(view)

    monkeypatch.setattr(method, "score", score)
    asked = watch(method, spec, inputs, budget).asked
    kept = {one.scale * window: one.ids() for one in asked if one.scale}
    decisions = sorted(int(name.rpartition(".")[2]) for name in g if name.startswith("kept.ids."))
    assert [step for step, *_ in seen] == decisions
    for step, position, state in seen:
        assert position.tolist() == g[f"before.ids.{step}"].tolist()
        assert state[..., 0].tolist() == g[f"before.last.{step}"].tolist()
        assert state[..., 1].tolist() == g[f"before.mri.{step}"].tolist()
        found = measure_importance(step - state[..., 0], state[..., 1], "program")
        torch.testing.assert_close(found, g[f"importance.{step}"], rtol=0, atol=1e-6)
        assert kept[step] == g[f"kept.ids.{step}"].sort(1).values.tolist()
    assert len(decisions) > 1


@pytest.mark.parametrize("group", ["max", "mean"])
def test_query_heads_that_share_slots_hit_by_their_largest_or_mean_attention(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec("shared", 1, 2, 8, next_token(20, [1, 1]), 1, 1.0, group=2)
    method, inputs = LazyEviction(alpha=0.05, group=group), tokens_of(spec, 1, groups=2)
    intervals, inner = [], method.score

    def score(view: View) -> Tensor:
        intervals.append(view.state[..., 1].clone())
        return inner(view)

    monkeypatch.setattr(method, "score", score)
    watch(method, spec, inputs, 20)
    keys = torch.cat([segment[0][1] for segment in inputs[:2]], 2)[0]
    shares = (inputs[1][0][0].view(2, 2, 8) @ keys.mT).softmax(-1)
    received = shares.amax(1) if group == "max" else shares.mean(1)
    assert torch.equal(intervals[-1] > 0, received >= 0.05)


def test_importance_falls_with_quiet_spells_and_in_the_program_with_intervals() -> None:
    interval = torch.arange(1.0, 10)
    for formula in ("program", "paper"):
        by_quiet = measure_importance(torch.arange(40.0), torch.full((40,), 5.0), formula)
        assert (by_quiet.diff() < 0).all()
        never = measure_importance(torch.tensor([0.0, 3.0]), torch.zeros(2), formula)
        assert never[1] == 0
        assert never[0] == (1 if formula == "paper" else pytest.approx(2 * 0.26894143))
    just_hit = [measure_importance(torch.zeros(9), interval, f) for f in ("program", "paper")]
    assert (just_hit[0].diff() < 0).all()
    assert (just_hit[1].diff() > 0).all()


LINES = ModelSpec("lines", 2, 3, D, next_token(3, [5] * 7 + [4]), logit_scale=0.7)


def lines_kept(
    q: Tensor, k: Tensor, room: int, min_tokens: int, given_settings: dict[str, Any]
) -> list[list[int]]:
    """Positions that one head holds after every segment, by the paper's words: q [query heads, n, D], k [n, D]."""
    anchors, recent = given_settings["anchors"], given_settings["recent"]
    image = [list(range(at.start, at.end)) for at in LINES.segments[1:-1]]
    condition = list(range(LINES.segments[0].end))
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
            worth = receive(q, k, held, queries, given_settings["attention"], LINES.logit_scale)
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
    inputs = tokens_of(LINES, 2, seed, groups)
    cache, seen, _ = watch(LineAR(sinks=1, **given_settings), LINES, inputs, budget)
    rooms = share_evenly(cache.method.budget.tokens, LINES)
    for layer in range(LINES.layers):
        q, k = (torch.cat([segment[layer][part] for segment in inputs], 2) for part in (0, 1))
        each = rooms[layer]
        for sequence in range(2):
            for head in range(LINES.heads):
                heads = q[sequence, head * groups : (head + 1) * groups]
                room = each if isinstance(each, int) else each[head]
                min_tokens = each if isinstance(each, int) else min(each)
                expected = lines_kept(heads, k[sequence, head], room, min_tokens, given_settings)
                row = sequence * LINES.heads + head
                found = [asked.ids(slice(row, row + 1))[0] for asked in seen if asked.layer == layer]
                assert found == expected


CONDITION, LINE = 3, 5
IMAGE = ModelSpec("image", 2, 2, D, next_token(CONDITION, [LINE] * 5 + [4]), 2, 0.7, group=2, line=LINE)


def attend(inputs: Any, layer: int, sequence: int, head: int, query: int, held: list[int]) -> Tensor:
    """Attention of a query to the held tokens before it and to itself, a mean over the heads that share the keys."""
    q, k = (torch.cat([segment[layer][n] for segment in inputs], 2)[sequence].double() for n in (0, 1))
    seen = [token for token in held if token <= query]
    heads = q[head * 2 : head * 2 + 2, query]
    attention = (heads @ k[head, seen].T * IMAGE.logit_scale).softmax(-1).mean(0)
    return torch.zeros(IMAGE.segments[-1].end, dtype=torch.float64).index_put(
        (torch.tensor(seen),), attention
    )


def test_distant_attention_is_what_the_neighbourhood_does_not_receive() -> None:
    inputs, observer = tokens_of(IMAGE, 4, 1, groups=2), DistantAttention(near=2, above=1)
    run(open_cache(observer, IMAGE), inputs)
    found = observer.average()["distant"]
    end = IMAGE.segments[-1].end
    for layer in range(IMAGE.layers):
        for head in range(IMAGE.heads):
            shares = []
            for prompt in range(2):  # those with a condition come first
                for query in range(CONDITION, end):
                    received = attend(inputs, layer, prompt, head, query, [*range(end)])
                    near = {query - x for x in (0, 1, 2, LINE - 1, LINE, LINE + 1)}
                    far = [t for t in range(CONDITION, query + 1) if t not in near]
                    shares.append(float(received[far].sum() / received[CONDITION:].sum()))
            assert found[layer, head].item() == pytest.approx(sum(shares) / len(shares), abs=1e-5)


@pytest.mark.parametrize(("accumulate", "recent"), [("all", 2), ("newest", 2), ("all", 100)])
def test_each_class_of_ssd_keeps_what_it_should(accumulate: Any, recent: int) -> None:
    """The newest tokens take two thirds of a semantic head at most."""
    inputs = tokens_of(IMAGE, 2, groups=2)
    method = SSD(sinks=1, window=6, recent=recent, accumulate=accumulate)
    distant, budget = torch.tensor([[0.1, 0.9], [0.9, 0.1]], dtype=torch.float64), 14  # low: spatial heads
    artifact = Artifact("distant_attention", {"distant": distant})
    asked = watch(method, IMAGE, inputs, budget, artifact).asked
    rooms = {True: CONDITION + 6, False: 2 * budget - CONDITION - 6}
    held = {(layer, row): [*range(CONDITION)] for layer in range(2) for row in range(4)}
    sums = {place: torch.zeros(IMAGE.segments[-1].end, dtype=torch.float64) for place in held}
    for one in asked[IMAGE.layers :]:
        segment = IMAGE.segments[one.scale]
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
