"""Methods that select what is read: pages of keys at every token, a middle scale's choice, and how much both read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reads import count_pairs
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.full import Full
from kvbench.methods.hack.plus_plus import HACKPlusPlus
from kvbench.methods.quest import Quest, bound_pages
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.sparvar import SparVAR
from tests.support.engine import D, note_calls, open_cache, prepared, run, tokens_of
from tests.support.steps import draw, generate

TEXT = ModelSpec("text", 3, 2, D, next_token(6, [8, 8, 8, 7]), 1, 0.7, group=2)
SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (3, 3), (4, 4), (6, 6)]), 1)


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_no_key_of_a_page_exceeds_its_bound(seed: int, page: int, slots: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(2, 3, 5, generator=generator), torch.randn(2, slots, 5, generator=generator)
    exists = torch.rand(2, slots, generator=generator) < 0.8
    bounds = bound_pages(queries, keys, exists, page)
    logits = (queries @ keys.mT).masked_fill(~exists[:, None], -torch.inf)
    for number, part in enumerate(logits.split(page, 2)):
        best = part.amax(2)
        assert (bounds[:, :, number] >= best - 1e-5).all()
        assert torch.equal(bounds[:, :, number] == -torch.inf, best == -torch.inf)
        if page == 1:
            torch.testing.assert_close(bounds[:, :, number], best)


@pytest.mark.parametrize("padding", [None, [0, 3]])
def test_each_token_attends_to_its_best_pages_and_to_nothing_else(padding: list[int] | None) -> None:
    method = Quest(attention_budget=8, page=4, dense_layers=1)
    seen, inputs = note_calls(method, "select_attended"), draw(TEXT, 2, groups=2)
    out = generate(open_cache(method, TEXT), inputs, padding)
    for view, chosen in seen:
        newest, (q, k, v) = view.segment.end - 1, inputs[view.layer]
        assert view.position.shape[1] == newest + 1
        if view.layer < 1 or newest < 8:
            assert chosen is None
            continue
        assert chosen is not None
        for row in range(4):
            sequence, head = divmod(row, 2)
            first = 0 if padding is None else padding[sequence]
            keys, asked = (k[sequence, head], q[sequence, 2 * head : 2 * head + 2, newest])
            bounds = []
            for start in range(first, newest + 1, 4):
                part = keys[start : min(start + 4, newest + 1)]
                both = torch.maximum(asked * part.amax(0), asked * part.amin(0)).sum(1)
                bounds.append(float(both.max()))
            last = (newest - first) // 4
            pages = {last, max(range(last), key=bounds.__getitem__)}
            tokens = [t for t in range(first, newest + 1) if (t - first) // 4 in pages]
            held = view.position[row][chosen[row] & (view.position[row] >= 0)].tolist()
            assert held == tokens
            attention = (asked @ keys[tokens].T * TEXT.logit_scale).softmax(-1)
            expected = attention @ v[sequence, head, tokens]
            found = out[view.layer][sequence, 2 * head : 2 * head + 2, newest]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_later_scales_read_what_the_middle_one_attended_to() -> None:
    method = SparVAR(density=0.4, sinks=1)
    seen, inputs = note_calls(method, "select_attended"), tokens_of(SCALES, 2)
    out = run(open_cache(method, SCALES), inputs)
    q, k, v = ([torch.cat([s[n][x] for s in inputs], 2) for n in range(2)] for x in range(3))
    middle = SCALES.segments[2]
    for layer in range(2):
        for row in range(4):
            sequence, head = divmod(row, 2)
            asked = q[layer][sequence, head, middle.start : middle.end].double()
            attention = (asked @ k[layer][sequence, head, : middle.end].double().T).softmax(-1).mean(0)
            best = {0, *attention.argsort(descending=True)[: int(0.4 * middle.end)].tolist()}
            for scale in SCALES.segments[3:]:
                places = [
                    other.start + y * other.width + x
                    for other in SCALES.segments[3 : scale.index + 1]
                    for y in range(other.height)
                    for x in range(other.width)
                    if middle.start + y * 3 // other.height * 3 + x * 3 // other.width in best
                ]
                tokens = sorted(best) + places
                (chosen,) = (
                    c for view, c in seen if (view.layer, view.segment.index) == (layer, scale.index)
                )
                assert chosen is not None
                assert chosen[row].nonzero()[:, 0].tolist() == tokens
                late = q[layer][sequence, head, scale.start : scale.end]
                weights = (late @ k[layer][sequence, head, tokens].T).softmax(-1)
                found = out[scale.index * 2 + layer][sequence, head]
                torch.testing.assert_close(
                    found, weights @ v[layer][sequence, head, tokens], rtol=1e-4, atol=1e-5
                )


def test_counted_pairs_are_those_of_the_formula() -> None:
    """Of scales: sum of t_k c_k, or of t_k min(c_k, read); of texts, half a square."""
    one = replace(SCALES, layers=1, heads=1)
    assert count_pairs(one, prepared(Full(), one)) == sum(s.length * s.end for s in one.segments)
    read = HACKPlusPlus(attention_budget=20)
    observer = read.needs()
    assert isinstance(observer, Observer)
    prepared(read, one, 1, observer.make_random_artifact(one))
    assert count_pairs(one, read) == sum(s.length * min(s.end, 20) for s in one.segments)
    text = replace(TEXT, heads=1, group=1)
    tokens = text.segments[-1].end
    assert count_pairs(text, prepared(Full(), text)) == 3 * tokens * (tokens + 1) // 2
    quest = prepared(Quest(attention_budget=8, page=4, dense_layers=1), text)
    late = [t for t in range(6, tokens) if t >= 8]  # these read a page and the newest, which may be short
    dense = tokens * (tokens + 1) // 2
    less = sum(t + 1 - (4 + t % 4 + 1) for t in late)
    assert count_pairs(text, quest) == 3 * dense - 2 * less
