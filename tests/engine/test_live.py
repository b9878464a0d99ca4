"""The ledger against the tensors that a cache keeps alive, counted after every layer of every segment."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.cache import KVCache
from kvbench.methods.adakv import AdaKV
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.triattention import QueryCentres, TriAttention
from tests.support.engine import D, open_cache, tokens_of

METHODS: dict[str, Callable[[], Method]] = {
    "all": lambda: TriAttention(shared="all", horizon=8, recent=1),
    "layers, ema": lambda: TriAttention(shared="layers", horizon=8, refresh=2, ema=0.5),
    "h2o": H2O,
    "adakv": lambda: AdaKV(window=1),
    "snapkv": lambda: SnapKV(window=1, queries="last"),
    "streaming_llm": lambda: StreamingLLM(sinks=0),
}
SLOT_BYTES = 2 * D * 4
"""Bytes of a key and a value in float32."""


def find_tensors(x: object) -> Iterator[Tensor]:
    """Tensors of numbers inside nested containers and dataclasses."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for one in x:
            yield from find_tensors(one)
    elif is_dataclass(x) and not isinstance(x, type):
        for field in fields(x):
            if field.name not in ("layout", "rows"):
                yield from find_tensors(getattr(x, field.name))


def count_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of memory that tensors cover; what several share counts once."""
    total = covered = 0
    for start, stop in sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors):
        total += max(0, stop - max(start, covered))
        covered = max(covered, stop)
    return total


def look(cache: KVCache, layer: int) -> tuple[int, int, int]:
    """Return stored slots of all sequences, counted from tensors and by the ledger, and bytes of all else alive."""
    slots = sum(
        len(store.keys) * (store.keys.shape[1] - len(store.layout.counts) * store.layout.free_slots)
        for store in cache._stores
    )
    waiting = [(one.q, one.k, one.v) for one in cache._waiting]
    live = count_bytes(find_tensors([cache._stores, waiting]))
    return slots, sum(cache.ledger.held[cache.segment.index][layer]) * cache._batch, live - slots * SLOT_BYTES


def observe(
    cache: KVCache, inputs: Sequence[Sequence[tuple[Tensor, ...]]], padding: list[int] | None, size: int
) -> Iterator[tuple[int, int, int]]:
    """Run a generation, `size` tokens at a time after the prompt; look after each layer of a full segment."""
    cache.reset(len(inputs[0][0][0]), padding)
    for segment, layers in zip(cache.spec.segments, inputs, strict=True):
        cache.begin(segment)
        step = size if segment.index else segment.length
        for start in range(0, segment.length, step):
            for layer, qkv in enumerate(layers):
                cache.attend(layer, *(x[:, :, start : start + step].clone() for x in qkv))
                if start + step >= segment.length and not segment.last:
                    yield look(cache, layer)


@pytest.mark.parametrize("name", METHODS)
@given(
    budget=st.integers(6, 13),
    layers=st.integers(1, 3),
    rows=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    padding=st.none() | st.lists(st.integers(0, 3), min_size=2, max_size=2),
    size=st.integers(1, 4),
)
@settings(max_examples=12, deadline=None)
def test_the_ledger_says_what_is_alive(
    name: str, budget: int, layers: int, rows: list[int], padding: list[int] | None, size: int
) -> None:
    segments = next_token(5, rows)
    spec = ModelSpec("text", layers, 2, D, segments, 1, D**-0.5, group=2, rope_base=100.0)
    observer = QueryCentres()
    observer.prepare(spec)
    method = METHODS[name]()
    artifact = observer.make_random_artifact(spec) if isinstance(method, TriAttention) else None
    cache = open_cache(method, spec, min(budget, spec.cached_length), artifact)
    slots, recorded, others = zip(*observe(cache, tokens_of(spec, 2, groups=2), padding, size), strict=True)
    assert recorded == slots
    assert max(slots) * SLOT_BYTES <= cache.ledger.peak_bytes
    if method.uses.joint:
        assert max(others) <= cache.ledger.transient_bytes + cache.ledger.state_bytes
