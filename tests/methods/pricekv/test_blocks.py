"""PriceKV by blocks in the cache: what the ledger counts is what was allocated, B is used, settings are checked."""

from itertools import product

import numpy as np
import pytest
import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.core.storage import CODEBOOKS
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing
from kvbench.methods.pricekv.allocate import build_problem
from kvbench.methods.pricekv.blocks import PriceKVBlocks
from kvbench.methods.pricekv.problem import list_sources, measure_usage
from kvbench.methods.shared.calibration import Artifact
from tests.support.engine import D, open_cache, run, tokens_of

SCALES = ModelSpec("scales", 3, 2, D, next_scale([(side, side) for side in (1, 2, 3, 4, 5)]))
ROWS = ModelSpec("rows", 3, 2, D, next_token(5, [*[6] * 8, 5]), logit_scale=D**-0.5)


def artifact_of(method: PriceKVBlocks, spec: ModelSpec) -> Artifact:
    return method.needs().make_random_artifact(spec)


def ran(method: PriceKVBlocks, spec: ModelSpec, budget: str) -> KVCache:
    there = open_cache(method, spec, budget, artifact_of(method, spec))
    run(there, tokens_of(spec, 2))
    return there


@pytest.mark.parametrize(("spec", "budget"), [(SCALES, "0.2"), (ROWS, "0.5")], ids=["scales", "rows"])
def test_the_ledger_counts_what_was_allocated(spec: ModelSpec, budget: str) -> None:
    there = ran(PriceKVBlocks(recent=3), spec, budget)
    held = measure_usage(there.method.problem, there.method.solution).reshape(-1, spec.layers + 1)
    assert there.ledger.tokens_after == held[:, 1:].tolist()


def test_weights_scale_the_errors_of_a_consumer() -> None:
    budget, sources = Budget.parse("0.1", SCALES), list_sources(SCALES, 1)
    error = artifact_of(PriceKVBlocks(), SCALES).tensors["error"]
    inverse, uniform, tokens = (
        build_problem(error, SCALES, budget, sources, weights=weights, forced=0).errors
        for weights in ("inverse_tokens", "uniform", "tokens")
    )
    for k, length in enumerate(SCALES.lengths):
        np.testing.assert_allclose(inverse[k] * length, uniform[k])
        np.testing.assert_allclose(tokens[k], uniform[k] * length)


def test_what_saw_nothing_fills_the_budget_all_the_same() -> None:
    method, budget = PriceKVBlocks(), Budget.parse("0.5", SCALES)
    blank = torch.zeros_like(artifact_of(method, SCALES).tensors["error"])
    method.prepare(SCALES, budget, Artifact("subset_error", {"error": blank}))
    held = measure_usage(method.problem, method.solution)
    assert budget.tokens - max(SCALES.lengths[:-1]) < held.max() <= budget.tokens


def in_bytes(menu: tuple[int, ...], share: bool, budget: str) -> KVCache:
    """A cache of the menu's precisions, out of random errors, noises and codebooks."""
    method = PriceKVBlocks(menu=menu, share=share)
    artifact = artifact_of(method, SCALES)
    artifact.tensors["noise"].mul_(1e-3)
    method.prepare(SCALES, Budget.parse_bytes(budget, SCALES, token_bytes=4 * D), artifact)
    codebooks = Codebooks().make_random_artifact(SCALES).tensors
    cache = KVCache(SCALES, method, dtype=torch.float32, packing=Packing(16, CODEBOOKS), codebooks=codebooks)
    run(cache, tokens_of(SCALES, 4))
    return cache


@pytest.mark.parametrize(("share", "budget"), [(False, "0.05"), (True, "0.1")])
def test_the_ledger_counts_the_bytes_that_were_allocated(share: bool, budget: str) -> None:
    there = in_bytes((16, 8, 4, 2), share, budget)
    method = there.method
    held = measure_usage(method.problem, method.solution).reshape(-1, SCALES.layers + 1)[:, 1:]
    pairs = np.array(there.ledger.held_bytes).max(-1) * SCALES.branches
    assert pairs.tolist() == held.tolist()
    assert 0.9 * method.budget.bytes < there.ledger.sequence_bytes <= method.budget.bytes
    places = product(range(3), SCALES.segments[:-1])
    used = {precision for place in places for precision in method.precisions(*place)}
    assert len({precision.bits for precision in used}) > 1
    assert any(precision.shared for precision in used) == share
