"""What rows held step by step, against tables of what was kept, and slot utilisation by hand."""

import pytest

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.ledger import Ledger, Step, add_ledgers, find_utilisation
from kvbench.methods.full import Full
from tests.support.engine import D, Drawn, DrawnPerSequence, draw_seen, open_cache, run, tokens_of

SPEC = ModelSpec("small", 3, 2, D, next_token(4, (5, 5, 5, 4)), 1, D**-0.5)


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
def test_steps_are_the_rows_that_a_table_keeps(kind: type[Drawn]) -> None:
    seen = draw_seen(SPEC, 1, 0.8)
    cache = open_cache(kind(seen), SPEC)
    run(cache, tokens_of(SPEC, 2))
    for sequence in range(2):
        steps = cache.ledger.trace(SPEC, sequence)
        lengths = [seen[at.index + 1, :, :, : at.end].sum(2) for at in SPEC.segments[:-1]]
        assert [step.tokens for step in steps] == [4, 9, 14, 19]
        assert [step.held for step in steps] == [
            pytest.approx(float(rows.double().mean())) for rows in lengths
        ]
        assert [step.longest for step in steps] == [int(rows.max()) for rows in lengths]
        assert {(step.lse, step.kept_lse) for step in steps} == {(None, None)}


def test_a_text_has_no_steps_beyond_its_end() -> None:
    """After a prompt of 4 tokens it has 10, of which the last is never fed back: the segment to 14 is not whole."""
    cache = open_cache(Full(), SPEC)
    run(cache, tokens_of(SPEC, 1))
    assert [step.tokens for step in cache.ledger.trace(SPEC, 0, drawn=10)] == [4, 9]
    assert [step.tokens for step in cache.ledger.trace(SPEC, 0, drawn=11)] == [4, 9, 14]


def test_utilisation_counts_from_the_first_drop() -> None:
    steps = [Step(4, 4, 4), Step(8, 8, 8), Step(12, 6.5, 8), Step(16, 7, 10)]
    assert find_utilisation(steps) == pytest.approx(13.5 / 18)
    assert find_utilisation(steps[:2]) is None
    uneven = [Step(tokens, tokens - 1 / 3, tokens) for tokens in (4, 9, 17, 100)]  # padding, nothing left
    assert find_utilisation(uneven) is None


def test_heads_in_several_processes_are_told_together() -> None:
    one = Ledger([[[3, 4]], [[3, 4]]], [[[2, 2]], [[0]]], drifts=-2.0, drops=4)
    other = Ledger([[[5, 2]], [[5, 2]]], [[[4, 1]], [[0]]], drifts=-1.0, drops=1)
    one.lse, other.lse = [[([1.0, 2.0], [0.5, 1.0])], []], [[([3.0, 4.0], [1.5, 3.0])], []]
    both = add_ledgers([one, other])
    assert both.lse_drift == pytest.approx(-3 / 5)
    spec = ModelSpec("small", 1, 4, D, next_token(4, (4,)), 1)
    assert both.trace(spec, 0) == [Step(4, 2.0, 4, 2.0, 1.0)]
    assert both.trace(spec, 1) == [Step(4, 1.5, 2, 3.0, 2.0)]
