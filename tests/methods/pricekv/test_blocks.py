"""PriceKV by blocks: its calibration by masked attention, what the ledger counts in a cache, and that B is used."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.core.storage import CODEBOOKS
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing
from kvbench.engine.view import CacheView
from kvbench.methods.pricekv.allocate import build_problem
from kvbench.methods.pricekv.blocks import PriceKVBlocks
from kvbench.methods.pricekv.errors import Importance, SubsetError
from kvbench.methods.pricekv.noise import PrecisionError, list_precisions
from kvbench.methods.pricekv.problem import list_sources, measure_usage
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.precision import Precision
from tests.support.engine import D, open_cache, run, tokens_of
from tests.support.layer_outputs import FOLD, SCALES, Inputs, attention, project, projections

PLAIN_SCALES = ModelSpec("scales", 3, 2, D, next_scale([(side, side) for side in (1, 2, 3, 4, 5)]))
PLAIN_ROWS = ModelSpec("rows", 3, 2, D, next_token(5, [*[6] * 8, 5]), logit_scale=D**-0.5)


def artifact_of(method: PriceKVBlocks, spec: ModelSpec) -> Artifact:
    return method.needs().make_random_artifact(spec)


def test_weights_scale_the_errors_of_a_consumer() -> None:
    budget, sources = Budget.parse("0.1", PLAIN_SCALES), list_sources(PLAIN_SCALES, 1)
    error = artifact_of(PriceKVBlocks(), PLAIN_SCALES).tensors["error"]
    inverse, uniform, tokens = (
        build_problem(error, PLAIN_SCALES, budget, sources, weights=weights, forced=0).errors
        for weights in ("inverse_tokens", "uniform", "tokens")
    )
    for k, length in enumerate(PLAIN_SCALES.lengths):
        np.testing.assert_allclose(inverse[k] * length, uniform[k])
        np.testing.assert_allclose(tokens[k], uniform[k] * length)


def test_what_saw_nothing_fills_the_budget_all_the_same() -> None:
    method, budget = PriceKVBlocks(), Budget.parse("0.5", PLAIN_SCALES)
    blank = torch.zeros_like(artifact_of(method, PLAIN_SCALES).tensors["error"])
    method.prepare(PLAIN_SCALES, budget, Artifact("subset_error", {"error": blank}))
    held = measure_usage(method.problem, method.solution)
    assert budget.tokens - max(PLAIN_SCALES.lengths[:-1]) < held.max() <= budget.tokens


@pytest.mark.parametrize(("share", "budget"), [(False, "0.05"), (True, "0.1")])
def test_the_ledger_counts_the_bytes_that_were_allocated(share: bool, budget: str) -> None:
    """Out of random errors, noises and codebooks."""
    method = PriceKVBlocks(menu=(16, 8, 4, 2), share=share)
    artifact = artifact_of(method, PLAIN_SCALES)
    artifact.tensors["noise"].mul_(1e-3)
    method.prepare(PLAIN_SCALES, Budget.parse_bytes(budget, PLAIN_SCALES, token_bytes=4 * D), artifact)
    codebooks = Codebooks().make_random_artifact(PLAIN_SCALES).tensors
    packing = Packing(16, CODEBOOKS)
    there = KVCache(PLAIN_SCALES, method, dtype=torch.float32, packing=packing, codebooks=codebooks)
    run(there, tokens_of(PLAIN_SCALES, 4))
    held = measure_usage(method.problem, method.solution).reshape(-1, PLAIN_SCALES.layers + 1)[:, 1:]
    pairs = np.array(there.ledger.held_bytes).max(-1) * PLAIN_SCALES.branches
    assert pairs.tolist() == held.tolist()
    assert 0.9 * method.budget.bytes < there.ledger.sequence_bytes <= method.budget.bytes
    places = product(range(3), PLAIN_SCALES.segments[:-1])
    used = {precision for place in places for precision in method.precisions(*place)}
    assert len({precision.bits for precision in used}) > 1
    assert any(precision.shared for precision in used) == share


ROWS = replace(SCALES, segments=next_token(3, [4, 4, 4, 4, 3]))


@pytest.mark.parametrize(
    ("spec", "recent", "importance", "projected"),
    [
        (SCALES, 1, "output", True),
        (SCALES, 1, "mass", False),
        (ROWS, 8, "output", False),
        (ROWS, 2, "output", True),
        (ROWS, 2, "mass", True),
    ],
)
def test_errors_are_those_of_masked_attention(
    spec: ModelSpec, recent: int, importance: Importance, projected: bool
) -> None:
    observer, inputs = (
        SubsetError(importance, queries=3, recent=recent),
        tokens_of(spec, 2 * spec.branches, groups=FOLD),
    )
    run(open_cache(observer, spec, projection=projections(spec).__getitem__ if projected else None), inputs)
    found = observer.average()["error"]
    expected, entry = torch.zeros_like(found), 0
    for at, sources in zip(spec.segments[1:], list_sources(spec, recent)[1:], strict=True):
        count = min(3, at.length)
        asking = [i * at.length // count for i in range(count)]
        for number in range(1 << len(sources)):
            seen = torch.zeros(at.end, dtype=torch.bool)
            for i in (*(source for bit, source in enumerate(sources) if number >> bit & 1), at.index):
                seen[spec.segments[i].start : spec.segments[i].end] = True
            for layer in range(spec.layers):
                for _, head, p, v in attention(spec, inputs, layer, at.index):
                    whole = p[:, asking]
                    kept = (whole * seen).sum(-1, keepdim=True)
                    apart = (whole * seen / kept) @ v - whole @ v
                    apart = project(apart, spec, layer, head) if projected else apart
                    error = apart.square().sum(-1) if importance == "output" else 1 - kept[..., 0]
                    expected[layer, head, entry] += error.mean(1).sum() / 2 / spec.branches
            entry += 1
    assert entry == found.shape[-1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_rows_have_the_prompt_and_the_newest_rows_as_sources() -> None:
    assert list_sources(ROWS, 2) == ((), (0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4))


FEW_SCALES = ModelSpec("scales", 2, 2, D, next_scale([(1, 1), (2, 2), (2, 3)]), logit_scale=0.5)
FEW_ROWS = replace(FEW_SCALES, segments=next_token(3, [4, 4, 3]))
MENU = list_precisions((16, 3), shared=True)


def blur(x: Tensor) -> Tensor:
    """A precision of three bits, as far as these tests know: halves."""
    return (2 * x).round() / 2


@pytest.fixture
def blurring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without codebooks: whatever has fewer than 16 bits is blurred."""

    def read_back(
        _: CacheView, keys: Tensor, values: Tensor, at: Segment, bits: int
    ) -> tuple[Tensor, Tensor]:
        assert keys.shape[1] == values.shape[1] == at.length
        return (keys, values) if bits == 16 else (blur(keys), blur(values))

    monkeypatch.setattr(CacheView, "read_back", read_back)


def read_source(inputs: Inputs, source: int, precision: Precision) -> Inputs:
    """Inputs whose keys and values of one source are as they are read in a precision."""

    def read(x: Tensor) -> Tensor:
        stored = blur(x) if precision.bits < 16 else x
        return stored[: len(x) // 2].repeat(2, 1, 1, 1) if precision.shared else stored

    changed = [(q, read(k), read(v)) for q, k, v in inputs[source]]
    return [*inputs[:source], changed, *inputs[source + 1 :]]


@pytest.mark.usefixtures("blurring")
@pytest.mark.parametrize(("spec", "recent"), [(FEW_SCALES, 8), (FEW_ROWS, 1)], ids=["scales", "rows"])
@pytest.mark.parametrize("projected", [True, False])
def test_noise_is_that_of_attention_over_changed_keys_and_values(
    spec: ModelSpec, recent: int, projected: bool
) -> None:
    observer = PrecisionError(queries=3, recent=recent, menu=MENU)
    projection = projections(spec).__getitem__ if projected else None
    inputs = tokens_of(spec, 4, groups=FOLD)
    run(open_cache(observer, spec, projection=projection), inputs)
    found = observer.average()["noise"]
    expected = torch.zeros_like(found)
    for at, sources in zip(spec.segments[1:], list_sources(spec, recent)[1:], strict=True):
        count = min(3, at.length)
        asking = [i * at.length // count for i in range(count)]
        for layer, source, (number, precision) in product(range(spec.layers), sources, enumerate(MENU)):
            changed = attention(spec, read_source(inputs, source, precision), layer, at.index)
            whole = attention(spec, inputs, layer, at.index)
            for (_, head, p, v), (_, _, p_whole, v_whole) in zip(changed, whole, strict=True):
                apart = p[:, asking] @ v - p_whole[:, asking] @ v_whole
                apart = project(apart, spec, layer, head) if projected else apart
                expected[layer, head, source, number, at.index] += apart.square().sum(-1).mean(1).sum() / 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (found[..., MENU.index(Precision(16)), :] == 0).all()
    assert (found[..., MENU.index(Precision(3)), :] > 0).any()
