"""Scales that are recorded once and repeated: the same codes as one by one, and the same ledger."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.core.graphs import GraphRecorder, Repetitions
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import open_cache
from tests.support.scale_models import SIDES, SPEC, Draw, infinity, var


def cache_of(method: Method, record: GraphRecorder | None = None) -> KVCache:
    return open_cache(method, SPEC, 1 if isinstance(method, Full) else 0.6, record=record)


@pytest.mark.parametrize("model", [infinity, var])
@pytest.mark.parametrize("method", [Full(), StreamingLLM(sinks=1)], ids=lambda method: type(method).__name__)
def test_repeated_scales_draw_the_same_codes(model: Callable[[], Draw], method: Method) -> None:
    draw, tape = model(), Tape()
    plain, recorded = cache_of(method), cache_of(method, tape)
    for seed in range(4):
        expected, found = draw(plain, 2, seed), draw(recorded, 2, seed)
        torch.testing.assert_close(found, expected)
        assert recorded.ledger == plain.ledger
        assert [layout.counts for layout in recorded.held.layouts] == [
            layout.counts for layout in plain.held.layouts
        ]
    # Once as they are, once recorded, then repeated.
    assert tape.recorded == len(SIDES)
    assert tape.repeated == 3 * len(SIDES)


@pytest.mark.parametrize("model", [infinity, var])
def test_other_batches_have_records_of_their_own(model: Callable[[], Draw]) -> None:
    draw, tape = model(), Tape()
    plain, recorded = cache_of(StreamingLLM(sinks=1)), cache_of(StreamingLLM(sinks=1), tape)
    for prompts in (1, 1, 2, 2, 1, 1, 2, 1):  # two prompts need another arena, which moves what is stored
        torch.testing.assert_close(draw(recorded, prompts, 7 + prompts), draw(plain, prompts, 7 + prompts))
        assert recorded.ledger == plain.ledger
    assert tape.recorded == 3 * len(SIDES)


@pytest.mark.slow
def test_memory_that_ran_out_is_given_back() -> None:
    """What was recorded holds its tensors; after an error nothing of a generation is left, and the next is right."""
    draw, tape = infinity(), Tape()
    plain, recorded = cache_of(StreamingLLM(sinks=1)), cache_of(StreamingLLM(sinks=1), tape)
    for _ in range(2):
        draw(recorded, 2, 7)
    gc.collect()
    before = count_tensors()
    recorded.forget()
    gc.collect()
    assert count_tensors() <= before - 2 * len(SIDES)
    assert tape.cleared == 1
    torch.testing.assert_close(draw(recorded, 2, 7), draw(plain, 2, 7))
    assert recorded.ledger == plain.ledger


def count_tensors() -> int:
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


def test_methods_that_look_at_data_are_not_recorded() -> None:
    assert cache_of(H2O(), Tape()).repetitions is None
    assert cache_of(StreamingLLM(sinks=1)).repetitions is None


def test_what_is_held_stays_where_it_is() -> None:
    again = Repetitions(Tape(), lambda: lambda: None)
    first = (torch.tensor([1.0]), (torch.tensor([2]), None))
    assert again.hold(first) is first
    place = first[0].data_ptr()
    held = again.hold((torch.tensor([3.0]), (torch.tensor([4]), None)))
    assert held[0].data_ptr() == place
    assert (held[0].item(), held[1][0].item()) == (3, 4)
    other = (torch.tensor([1.0, 5.0]), (torch.tensor([2]), None))
    assert again.hold(other) is other
