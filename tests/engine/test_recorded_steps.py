"""Steps of a next-token model that one recording repeats: outputs, kept tokens and ledgers of single steps.

Every method, and its further settings, runs two generations of a batch with equal and with unequal prompts. A tape on
the CPU takes the place of a CUDA graph, and torch's operations take the place of the one-token kernel.
"""

from copy import deepcopy
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.cache import KVCache
from kvbench.engine.ledger import Ledger
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from tests.methods.test_prompt_lengths import METHODS, describe
from tests.support.conformance import artifact_for
from tests.support.engine import D, prepared
from tests.support.marks import slow_except
from tests.support.methods import list_methods
from tests.support.token_kernel import KERNEL, decode

pytest.importorskip("triton")

LAYERS, HEADS, GROUP, PROMPTS = 2, 2, 2, 2
SPEC = ModelSpec(
    "steps", LAYERS, HEADS, D, next_token(9, (4, 4, 4, 3)), branches=1, logit_scale=D**-0.5, group=GROUP,
    padding_counts=False,
)  # fmt: skip
LATER = sum(segment.length for segment in SPEC.segments[1:])
TOKENS = 14
"""Tokens of a head."""


def prepare(name: str, sinks: int) -> Method:
    """Without sinks the first tokens never leave (`protect.leading`)."""
    method = deepcopy(describe(name, sinks))
    budget = Budget(Fraction(TOKENS * SPEC.all_heads + 1), SPEC.full_tokens, SPEC.all_heads)
    method.prepare(SPEC, budget, artifact_for(method, SPEC))
    return method


def draw(seed: int) -> list[Tensor]:
    """Queries, keys and values of all layers at each call: the prompt, then token by token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(LAYERS, GROUP + 2, PROMPTS, HEADS, tokens, D, generator=generator)
        for tokens in (SPEC.segments[0].length, *[1] * LATER)
    ]


def step(cache: KVCache, given: Tensor) -> Tensor:
    outputs = []
    for layer, (*q, k, v) in enumerate(given):
        queries = torch.stack(q, 2).flatten(1, 2)  # query heads of a KV head are neighbours
        outputs.append(cache.attend(layer, queries, k, v))
    return torch.stack(outputs)


def generate(
    cache: KVCache, inputs: list[Tensor], padding: list[int] | None
) -> tuple[list[Tensor], list, Ledger]:
    """Outputs of all tokens, positions of kept tokens after each segment, and the ledger."""
    cache.reset(PROMPTS, padding)
    outputs, kept, calls = [], [], iter(inputs)
    for segment in SPEC.segments:
        cache.begin(segment)
        repeat = cache.open_steps()
        for _ in range(segment.length if segment.index else 1):
            given = next(calls)
            out = step(cache, given) if repeat is None else repeat(0, lambda x: step(cache, x), given)
            outputs.append(out.clone())
        kept.append([store.layout.positions.tolist() for store in cache._stores])
    return outputs[1:], kept, cache.ledger


PADDED = [0, 3]
CASES: list[tuple[str, list[int] | None, int]] = [
    (name, padding, 1) for name in ("full", *METHODS) for padding in (PADDED, None)
] + [(name, PADDED, 0) for name in ("chunkkv", "h2o", "hard_kv", "heatkv", "pricekv", "random", "snapkv")]


def is_quick(case: tuple[str, list[int] | None, int]) -> bool:
    name, padding, sinks = case
    return (
        not sinks
        or name in ("full", "h2o", "streaming_llm")
        or (padding == PADDED and name in list_methods())
    )


@pytest.mark.parametrize(("name", "padding", "sinks"), slow_except(is_quick, CASES))
def test_recorded_steps_are_single_steps(
    name: str, padding: list[int] | None, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KERNEL, decode)
    make = (lambda: prepared(Full(), SPEC, 1)) if name == "full" else (lambda: prepare(name, sinks))
    tape = Tape()
    single, recorded = (KVCache(SPEC, make(), dtype=torch.float32, record=record) for record in (None, tape))
    for seed in range(2):
        expected, found = (generate(cache, draw(seed), padding) for cache in (single, recorded))
        if not recorded.method.budgeted:  # grows in place
            assert found[2].rebuild_bytes == found[2].peak_bytes < expected[2].rebuild_bytes
            found[2].rebuild_bytes = expected[2].rebuild_bytes
        assert found[1:] == expected[1:]
        torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-4)
    if recorded.repetitions is None:
        assert recorded.method.uses.sparse_reads
        return
    # Single steps: the first one, which compiles kernels. All segments and generations repeat one recording.
    assert (tape.recorded, tape.repeated) == (1, 2 * LATER - 1)
