"""Prompts of unequal length: a batch is equal to each prompt alone, and padding is neither seen, kept nor counted."""

from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.hack.classes import ColumnVariance
from kvbench.methods.headkv import HeadKV
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.linear_ar import LineAR
from kvbench.methods.scalekv import AttentionSelectivity
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from tests.support.engine import Asked, D, Drawn, DrawnPerSequence, draw_seen, listening, open_cache
from tests.support.steps import PROMPT, agree, draw, generate, masked, shapes


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from((0.0, 0.2, 0.6, 0.95, 1.0)),
    padding=st.lists(st.integers(0, 3), min_size=1, max_size=3) | st.sampled_from(([0], [0, 0, 0])),
    groups=st.integers(1, 2),
    size=st.integers(1, 3),
    heads=st.sampled_from((1, 2, 3, 12)),
    rows=st.lists(st.integers(1, 5), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_rows_equal_attention_over_what_exists(
    kind: type[Drawn],
    seed: int,
    share: float,
    padding: list[int],
    groups: int,
    size: int,
    heads: int,
    rows: list[int],
) -> None:
    """Prompts of equal length come in steps too."""
    spec = shapes(4, rows, heads)
    seen = draw_seen(spec, seed, share)
    cache, inputs = open_cache(kind(seen), spec), draw(spec, len(padding), groups, seed)
    expected = masked(spec, inputs, padding, seen)
    for _ in range(2):
        agree(generate(cache, inputs, padding, size, split=not any(padding)), expected, padding)
    for at in spec.segments[:-1]:
        held = [seen[at.index + 1, :, :, behind : at.end].sum((1, 2)).tolist() for behind in padding]
        assert cache.ledger.tokens_after[at.index][-1] == max(map(sum, held))


def ids(seen: list[Asked], sequence: int, heads: int, before: int = 0) -> list[list[list[int]]]:
    """Positions that one sequence keeps, each time the method is asked, `before` tokens later."""
    rows = slice(sequence * heads, (sequence + 1) * heads)
    return [[[position + before for position in row] for row in asked.ids(rows)] for asked in seen]


PADDING = [0, 3, 1, 4]


@pytest.mark.parametrize("tokens", [60, 64])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        H2O(),
        SnapKV(window=2, queries="last", pool="avg", softmax="prefix", group="max", kernel=3),
        LineAR(sinks=1, recent=1),
        HeadKV(sinks=1, recent=1, threshold=0.8, local_window=8),
    ],
    ids=repr,
)
def test_a_batch_equals_each_prompt_alone(method: Method, tokens: int, size: int) -> None:
    """Where padding counts; where it does not, tests/methods/test_every_method.py has all methods."""
    spec = shapes()
    inputs = draw(spec, len(PADDING), groups=2)
    batch = copy(method)
    batch.prepare(spec, Budget(Fraction(tokens), spec.full_tokens, spec.all_heads))
    seen = listening(batch)
    cache = KVCache(spec, batch, dtype=torch.float32)
    found = generate(cache, inputs, PADDING, size)
    assert cache.ledger.peak_tokens == tokens
    for sequence, behind in enumerate(PADDING):
        short = shapes(PROMPT - behind)
        alone = copy(method)
        left = Fraction(tokens - behind * spec.all_heads)
        alone.prepare(short, Budget(left, short.full_tokens, short.all_heads))
        kept = listening(alone)
        own = [tuple(x[sequence : sequence + 1, :, behind:] for x in qkv) for qkv in inputs]
        expected = generate(KVCache(short, alone, dtype=torch.float32), own, None, size)
        agree([x[sequence : sequence + 1, :, behind:] for x in found], expected, [0])
        assert ids(seen, sequence, spec.heads) == ids(kept, 0, spec.heads, behind)


def test_one_token_a_row_stays_where_padding_takes_all_the_room() -> None:
    spec = shapes()
    cache = open_cache(H2O(), spec, "0.1")  # two tokens a head; four of six tokens of the prompt are padding
    generate(cache, draw(spec, 2), [4, 4])
    assert cache.ledger.peak_tokens == spec.all_heads


@pytest.mark.parametrize("counts", [True, False])
def test_padding_is_no_unused_budget(counts: bool) -> None:
    """Rows that every prompt lacks, or whole rows where padding does not count."""
    spec = replace(shapes(), padding_counts=counts)
    cache = open_cache(H2O(), spec, 9)
    generate(cache, draw(spec, 2), [2, 3])
    assert cache.ledger.measure_use(spec, cache.method.budget, range(2)).least_share == 1
    if not counts:
        assert cache.ledger.held[0][-1] == [4 * spec.all_heads, 3 * spec.all_heads]
        assert cache.ledger.held[-1][-1] == [9 * spec.all_heads] * 2


@dataclass
class Watching(Method):
    """Keeps everything and notes what it is shown."""

    shown: list[tuple[int, int, dict[str, Tensor]]] = field(default_factory=list)

    uses = Uses(last_segment=True)

    def keep(self, view: View) -> None:
        """Keep everything."""
        every = torch.arange(view.segment.length)
        found = {"position": view.position, "last": view.mass(every[-2:]), "logits": view.logits(every)}
        self.shown.append((view.segment.index, view.layer, {**found, "scores": view.scores(every)}))


@pytest.mark.parametrize(("padding", "size"), [([0, 0], 1), ([0, 0], 100), ([0, 2, 4], 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_method_is_called_once_per_segment(padding: list[int], size: int, groups: int) -> None:
    spec, method = shapes(5, (4, 2)), Watching()
    inputs = draw(spec, len(padding), groups)
    generate(open_cache(method, spec), inputs, padding, size, split=not any(padding))
    assert [at[:2] for at in method.shown] == [(k, layer) for k in range(3) for layer in range(2)]
    for (index, layer, shown), row in product(method.shown, range(len(padding) * spec.heads)):
        (sequence, head), at, (q, k, _) = divmod(row, spec.heads), spec.segments[index], inputs[layer]
        behind = padding[sequence]
        first = max(at.start, behind)
        queries, held = torch.arange(first, at.end), torch.arange(behind, at.end)
        asked, keys = q[sequence, head * groups : (head + 1) * groups, queries], k[sequence, head, held]
        scores = (asked @ keys.T * D**-0.5).masked_fill(held > queries[:, None], -torch.inf)
        weights = scores.softmax(-1)
        expected = {
            "position": held, "last": weights[:, -2:].mean((0, 1)),
            "logits": scores.masked_fill(scores == -torch.inf, 0).sum((0, 1)),
        }  # fmt: skip
        exists = shown["position"][row] >= 0
        for name, value in expected.items():
            torch.testing.assert_close(shown[name][row, exists], value, atol=1e-5, rtol=1e-4, msg=name)
            assert (shown[name][row, ~exists] == (-1 if name == "position" else 0)).all(), name
        found = shown["scores"][row]
        torch.testing.assert_close(found[:, first - at.start :, exists], scores, atol=1e-5, rtol=1e-4)
        assert (found[:, : first - at.start] == -torch.inf).all()
        assert (found[:, :, ~exists] == -torch.inf).all()


@pytest.mark.parametrize("kind", [AttentionByScale, AttentionSelectivity, ColumnVariance])
def test_calibrations_see_each_prompt_as_it_is_alone(kind: type[Observer]) -> None:
    spec = shapes(branches=2)
    inputs = draw(spec, 2 * len(PADDING))
    together = kind()
    generate(open_cache(together, spec), inputs, PADDING * 2)
    [(name, summed)] = together.sums.items()
    sums = torch.zeros_like(summed)
    for sequence, behind in enumerate(PADDING):
        short = shapes(PROMPT - behind, branches=2)
        alone = kind()
        rows = [sequence, len(PADDING) + sequence]
        own = [tuple(x[rows, :, behind:] for x in qkv) for qkv in inputs]
        generate(open_cache(alone, short), own)
        sums += alone.sums[name]
    torch.testing.assert_close(summed, sums, atol=1e-6, rtol=1e-5)
    assert summed.abs().sum() > 0


def test_padding_and_tokens_that_cannot_be_are_refused() -> None:
    spec = shapes()
    cache = open_cache(Full(), spec)
    for padding in ([1], [1, PROMPT], [-1, 2]):
        with pytest.raises(ValueError, match="must be 2 values from 0 to 5"):
            cache.reset(2, padding)
    cache.reset(2, [1, 0])
    cache.begin(spec.segments[0])
    with pytest.raises(ValueError, match="padded prompts need one pass: got 2 of 6 tokens"):
        cache.attend(0, *torch.zeros(3, 2, 3, 2, D))
    scales = ModelSpec("scales", 2, 3, D, next_scale([(2, 2), (3, 3)]), 1)
    with pytest.raises(ValueError, match="scales: only prompts of next-token models can be padded"):
        open_cache(Full(), scales).reset(2, [1, 0])
    for one, part, told in ((spec, 7, "received token 7 of 6"), (scales, 1, "got 1 of 4 tokens")):
        cache = open_cache(Full(), one)
        cache.reset(2)
        cache.begin(one.segments[0])
        with pytest.raises(ValueError, match=f"segment 0: {told}"):
            cache.attend(0, *torch.zeros(3, 2, 3, part, D))
