"""Bytes that attention reads from the cache, against a loop over every step, layer and head, and against the plan."""

from collections.abc import Sequence
from itertools import product

import pytest
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.engine.ledger import add_ledgers
from kvbench.engine.schedule import predict_row_lengths
from kvbench.engine.work import hold, list_reads, list_steps
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.quest import Quest
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import D, listening, open_cache, run, small, tokens_of
from tests.support.steps import draw, generate, shapes

TOKEN = 2 * D * 4
"""Bytes of a key and a value in float32."""


def count_slowly(spec: ModelSpec, kept: dict[tuple[int, int, int], int], steps: Sequence[int]) -> int:
    """Bytes of a sequence's generation; `kept` by (segment, layer, head), `steps` of each segment."""
    places = product(spec.segments, range(spec.layers), range(spec.heads))
    held = {(at, *place): kept.get((at.index - 1, *place), 0) for at, *place in places}
    return sum(TOKEN * (count + step) for (at, *_), count in held.items() for step in range(steps[at.index]))


@pytest.mark.parametrize("method", [StreamingLLM(sinks=1), H2O(recent=0.3)])
@pytest.mark.parametrize("family", ["scales", "tokens"])
def test_a_step_reads_what_was_kept_and_what_came_since(method: Method, family: str) -> None:
    spec = small() if family == "scales" else shapes()
    asked = listening(method)
    cache = open_cache(method, spec, 0.4)
    if family == "scales":
        run(cache, tokens_of(spec, 2))
        steps = [1] * len(spec.segments)
    else:
        generate(cache, draw(spec, 2))
        steps = [1, *spec.lengths[1:]]
    for sequence in range(2):
        kept = {
            (one.scale, one.layer, head): int(one.kept[row].sum())
            for one in asked
            for head in range(spec.heads)
            for row in [(sequence * spec.heads + head) % len(one.kept)]
        }
        assert cache.ledger.reads.count([sequence]) == count_slowly(spec, kept, steps)
    lengths = predict_row_lengths(spec, method)
    assert lengths is not None
    held = hold(lengths, TOKEN * lengths.sum(2), TOKEN)
    assert cache.ledger.reads.count([0]) == list_reads(spec, list_steps(spec), held).sum()


def test_a_selection_reads_its_pages() -> None:
    """Of the prompt and of the first layer every step reads all; else what is selected of the earlier tokens."""
    spec, method, expected = shapes(), Quest(attention_budget=8, page=4, dense_layers=1), [0, 0]
    choose = method.select_attended

    def note(view: View) -> Tensor | None:
        chosen, newest = choose(view), view.segment.end - 1
        for row, positions in enumerate(view.position.tolist()):
            for slot, position in enumerate(positions):
                read = chosen is None or bool(chosen[row, slot])
                expected[row // spec.heads] += TOKEN * (read and 0 <= position < newest)
        return chosen

    method.select_attended = note
    for padding in (None, (0, 3)):
        cache, expected[:] = open_cache(method, spec), [0, 0]
        generate(cache, draw(spec, 2), padding)
        assert [cache.ledger.reads.count([s]) for s in range(2)] == expected
    full = open_cache(Full(), spec)
    generate(full, draw(spec, 2))
    assert expected[1] < expected[0] < full.ledger.reads.count([0])


def test_reads_end_with_a_text_and_are_summed_over_processes() -> None:
    """A text of 8 tokens after a prompt of 6 feeds 7 of them; a share has one of three heads."""
    spec = shapes(branches=2)
    cache = open_cache(Full(), spec)
    generate(cache, draw(spec, 2))
    reads = cache.ledger.reads
    assert reads.count([0], 8) == spec.all_heads * TOKEN * sum(range(6, 13))
    assert reads.count([0], 1) == 0
    assert reads.count(range(2)) == 2 * reads.count([0], spec.drawn_tokens) == 2 * reads.count([0])
    share = spec.take_share(0, 3)
    parts = [open_cache(Full(), share) for _ in range(3)]
    for part in parts:
        generate(part, draw(share, 2))
    assert add_ledgers([part.ledger for part in parts]).reads == reads
