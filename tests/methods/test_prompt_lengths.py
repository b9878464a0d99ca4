"""Independence of what a method keeps of a text from padding in front of its prompt and from the batch.

Every method, and its further settings, runs a batch of three prompts and each of them alone, at the same capacity, in a
model whose longest prompt is as long. The budget is so small that prompts of the batch do not fit.
"""

from copy import deepcopy
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.cache import KVCache
from kvbench.methods.shared import plans
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.wrapper import Wrapper
from tests.support.conformance import artifact_for
from tests.support.engine import D
from tests.support.marks import slow_except
from tests.support.methods import class_of, list_methods, list_variants, settings_of
from tests.support.small_models import composed

LENGTHS = (24, 17, 9)
"""Tokens of the prompts of a batch."""
LATER = (8, 8, 8, 8, 8, 7)
LAYERS, HEADS = 3, 2
OTHER_SETTINGS = {  # whose defaults do not bring out a rule
    "lagkv": {"lag": 5},
    "noncausal": {"chunk": 4},
    "quest": {"page": 4, "attention_budget": 12, "dense_layers": 0},
}
NOT_OF_TEXTS = ("full", "pricekv/by_token", "pricekv/by_token_surprise")
METHODS = [
    name
    for name in (*list_methods(), *list_variants())
    if "next-token" in class_of(name).families
    and not settings_of(name).get("menu")  # precisions have one plan, for the longest prompt
    and name not in NOT_OF_TEXTS
]
CASES = [(0, 14), (1, 36)]
"""Protected segments, and tokens of a head."""


TOO_FEW = 20
"""Tokens of a head: fewer than the model's longest prompt has, more than a run's prompts have."""
FITTING = [name for name in METHODS if name != "lazy_eviction"]  # which keeps a chunk beside the prompt
QUICK = (
    "h2o",
    "heatkv",
    "streaming_llm",
    "snapkv",
    "chunkkv",
    "expected_attention",
    "pricekv/by_score",
    "meda",
)


class Generation(NamedTuple):
    """Tokens kept, counted from the prompt's first one, by (segment, layer) and head; outputs of later segments."""

    kept: list[list[list[int]]]
    outputs: list[Tensor]
    least_share: float


def spec_of(prompt: int) -> ModelSpec:
    segments = next_token(prompt, LATER)
    return ModelSpec(
        "text", LAYERS, HEADS, D, segments, branches=1, logit_scale=D**-0.5, padding_counts=False
    )


@lru_cache
def describe(name: str, sinks: int) -> Method:
    """The method of a file; not prepared."""
    cfg = composed("model=llamagen_tiny").copy()
    OmegaConf.set_struct(cfg, False)
    cfg.method = OmegaConf.merge(settings_of(name), OTHER_SETTINGS.get(name, {}))
    cfg.sinks, cfg.protect.leading = sinks, 0 if sinks else 3  # first tokens instead of the prompt
    method = instantiate(cfg.method)
    assert isinstance(method, Method)
    return method


def budget_of(spec: ModelSpec, tokens: int) -> Budget:
    """One token more than an even share."""
    return Budget(Fraction(tokens * spec.all_heads + 1), spec.full_tokens, spec.all_heads)


@lru_cache
def draw(sequence: int) -> Tensor:
    """Queries, keys and values, [layers, 3, 1, heads, tokens, D]."""
    generator = torch.Generator().manual_seed(3 + sequence)
    tokens = LENGTHS[sequence] + sum(LATER)
    return torch.randn(LAYERS, 3, 1, HEADS, tokens, D, generator=generator)


def generate(method: Method, spec: ModelSpec, sequences: range) -> list[Generation]:
    """Generate a batch with a method that is prepared for `spec`, or for shorter prompts."""
    cache = KVCache(spec, method, dtype=torch.float32)
    cut = spec.segments[0].length - method.spec.segments[0].length
    room, cache.prompts = spec.segments[0].length, sequences
    padding = [room - LENGTHS[sequence] for sequence in sequences]
    noise = torch.Generator().manual_seed(9)
    inputs = torch.cat(
        [
            torch.cat((torch.randn(LAYERS, 3, 1, HEADS, behind, D, generator=noise), draw(sequence)), 4)
            for behind, sequence in zip(padding, sequences, strict=True)
        ],
        2,
    )
    cache.reset(len(sequences), padding)
    kept, outputs = [], []
    for at in spec.segments:
        cache.begin(at)
        out = [cache.attend(layer, *inputs[layer][..., at.start : at.end, :]) for layer in range(LAYERS)]
        outputs += out if at.index else []
        for store in [] if at.last else cache._stores:
            rows = store.layout.positions.tolist()
            kept.append(rows * (len(sequences) * HEADS // len(rows)))
    return [
        Generation(
            [
                [
                    [token + cut - behind for token in row if token >= 0]
                    for row in rows[number * HEADS : (number + 1) * HEADS]
                ]
                for rows in kept
            ],
            [out[number] for out in outputs],
            cache.ledger.measure_use(spec, method.budget, [number]).least_share,
        )
        for number, behind in enumerate(padding)
    ]


def prepare(name: str, sinks: int, tokens: int, prompt: int, artifact: Artifact | None) -> Method:
    method, spec = deepcopy(describe(name, sinks)), spec_of(prompt)
    method.calibrated_spec = spec_of(LENGTHS[0])
    method.prepare(spec, budget_of(spec, tokens), artifact)
    return method


@pytest.mark.parametrize(("sinks", "tokens"), CASES)
@pytest.mark.parametrize("name", METHODS)
def test_a_text_is_the_same_behind_padding_and_beside_others(name: str, sinks: int, tokens: int) -> None:
    artifact = artifact_for(describe(name, sinks), spec_of(LENGTHS[0]))
    try:
        method = prepare(name, sinks, tokens, LENGTHS[0], artifact)
    except InfeasibleBudget:
        assert sinks
        return
    together = generate(method, spec_of(LENGTHS[0]), range(3))
    for sequence, found in enumerate(together):
        alone = prepare(name, sinks, tokens, LENGTHS[sequence], artifact)
        [expected] = generate(alone, spec_of(LENGTHS[sequence]), range(sequence, sequence + 1))
        assert found.kept == expected.kept
        assert found.least_share == expected.least_share
        torch.testing.assert_close(found.outputs, expected.outputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", slow_except(lambda name: name in QUICK, FITTING))
def test_prompts_of_a_run_fit_where_the_longest_of_the_model_would_not(name: str) -> None:
    room = spec_of(LENGTHS[0])
    artifact = artifact_for(describe(name, 1), room)
    method = prepare(name, 1, TOO_FEW, LENGTHS[1], artifact)
    for sequences in (range(1, 3), range(1, 2)):  # with other padding, and without
        for sequence, found in zip(sequences, generate(method, room, sequences), strict=True):
            alone = prepare(name, 1, TOO_FEW, LENGTHS[sequence], artifact)
            [expected] = generate(alone, spec_of(LENGTHS[sequence]), range(sequence, sequence + 1))
            assert found.kept == expected.kept
            assert found.least_share == expected.least_share
            torch.testing.assert_close(found.outputs, expected.outputs, atol=1e-5, rtol=1e-4)


def test_a_prompt_longer_than_those_of_the_run_is_refused() -> None:
    method = prepare("h2o", 1, TOO_FEW, LENGTHS[1], None)
    cache = KVCache(spec_of(LENGTHS[0]), method, dtype=torch.float32)
    for padding, shown in (([8, 6], r"\[8, 6\]"), (None, r"\[0, 0\]")):
        with pytest.raises(
            ValueError, match=rf"padding {shown}: the method was prepared for .* 7 such tokens"
        ):
            cache.reset(2, padding)


def test_a_long_run_holds_the_plans_of_a_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 1)
    spec = spec_of(LENGTHS[0])
    method = prepare("chunkkv", 0, 14, LENGTHS[0], None)
    assert isinstance(method, Wrapper)
    first = generate(method, spec, range(3))
    assert sorted(method._plans) == sorted(method.base._plans) == [9, 17]
    [again] = generate(method, spec, range(2, 3))
    assert list(method._plans) == list(method.base._plans) == [9]
    assert again.kept == first[2].kept
