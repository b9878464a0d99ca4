"""Presses of kvpress as guests, against kvpress on transformers' own attention."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods import presses
from kvbench.methods.presses import KVPress, PressError, find_ratio, list_presses, make_press
from kvbench.models.parts.rotary import rotate_line
from tests.support.drawing import halves_as_pairs
from tests.support.engine import D, small, tokens_of, watch
from tests.support.places import ROOT

HEADS, GROUPS, TOKENS, LATER, KEPT = 2, 3, 96, 20, 40
SKETCH = 256  # so many that hardly anything depends on what is drawn
SPEC = ModelSpec("line", 1, HEADS, D, next_token(TOKENS, [LATER]), branches=1, logit_scale=D**-0.5)
TEXT = replace(SPEC, layers=2, segments=next_token(TOKENS, [1] * LATER))
SCALES = small(heads=HEADS, sides=(1, 2, 3, 4, 6, 8))
SETTINGS: Mapping[str, dict[str, Any]] = {
    "SnapKVPress": {"window_size": 8},
    "CapPress": {"n_future_positions": LATER},
    "ExpectedAttentionPress": {"n_future_positions": LATER},
    "LagKVPress": {"lag_size": 16},
    "NonCausalAttnPress": {"chunk_size": 20},
    "CompactorPress": {"chunk_size": 20, "sketch_dimension": SKETCH},
    "LeverageScorePress": {"sketch_dimension": SKETCH},
}
OURS = {
    "KnormPress": "knorm", "KeyDiffPress": "keydiff", "SnapKVPress": "snapkv", "TOVAPress": "tova",
    "StreamingLLMPress": "streaming_llm", "CURPress": "cur", "LagKVPress": "lagkv", "LeverageScorePress": "leverage",
    "NonCausalAttnPress": "noncausal", "CompactorPress": "compactor", "ExpectedAttentionPress": "expected_attention",
    "CapPress": "capkv",
}  # fmt: skip
"""The method that does the same, by press; both are compared in tests/methods by recorded scores."""
needs_kvpress = pytest.fixture(
    lambda: pytest.importorskip("kvpress", reason="the extra `kvpress` is not installed")
)


@cache
def attention() -> tuple[Any, Tensor, dict[str, Tensor]]:
    """An attention module of transformers, a prompt's hidden states, and its q, k, v after the rotation."""
    from transformers.models.llama import modeling_llama as llama

    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS * GROUPS, "num_key_value_heads": HEADS, "head_dim": D}
    config = llama.LlamaConfig(hidden_size=48, rope_theta=10000.0, **heads)
    module = llama.LlamaAttention(config, 0)
    for parameter in module.parameters():  # fresh ones are so small that queries hardly matter
        torch.nn.init.normal_(parameter, std=0.25)
    module.rotary_emb = llama.LlamaRotaryEmbedding(config)
    hidden = torch.randn(1, TOKENS, 48)
    with torch.no_grad():
        q, k, v = (
            layer(hidden).unflatten(-1, (-1, D)).transpose(1, 2)
            for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
        cos, sin = module.rotary_emb(hidden, torch.arange(TOKENS)[None])
        q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
    return module, hidden, {"q": q, "k": k, "v": v, "cos": cos, "sin": sin}


@pytest.mark.usefixtures("needs_kvpress")
@pytest.mark.parametrize("name", sorted(OURS))
def test_a_guest_keeps_what_kvpress_keeps(name: str) -> None:
    module, hidden, x = attention()
    press = make_press(name, SETTINGS.get(name, {}))
    press.compression_ratio = 1 - (KEPT + 0.5) / TOKENS
    more = {"position_embeddings": (x["cos"], x["sin"]), "hidden_states": hidden}
    with torch.no_grad(), torch.random.fork_rng([]):
        scores = press.score(module, hidden, x["k"].clone(), x["v"].clone(), None, more)[0]
    expected = [sorted(row) for row in scores.topk(KEPT, -1).indices.tolist()]
    prompt = (halves_as_pairs(x["q"]), halves_as_pairs(x["k"]), x["v"])
    inputs, rotation = (
        [[prompt], [tuple(x[:, :, :LATER] for x in prompt)]],
        rotate_line(TOKENS + LATER, D, 10000.0),
    )
    asked = watch(KVPress(name, SETTINGS.get(name, {})), SPEC, inputs, KEPT, rotation=rotation).asked
    assert asked[0].ids() == expected


def runs_on(name: str, spec: ModelSpec, asked: Literal["prompt", "every"]) -> str:
    """Whether a press goes through a generation, within its budget."""
    try:
        method = KVPress(name, SETTINGS.get(name, {}), asked)
        cache = watch(method, spec, tokens_of(spec, spec.branches, groups=GROUPS), 0.3).cache
    except PressError:
        return ""
    assert max(tokens for row in cache.ledger.tokens_after for tokens in row) <= cache.method.budget.tokens
    assert cache.ledger.peak_tokens > 0.8 * cache.method.budget.tokens
    return "yes"


@pytest.mark.slow
@pytest.mark.usefixtures("needs_kvpress")
def test_the_table_of_presses_is_that_of_the_page() -> None:
    rows = ["| press | method here | prompt | every step | scales |", "| --- | --- | --- | --- | --- |"]
    for name in list_presses():
        works = [runs_on(name, *case) for case in ((TEXT, "prompt"), (TEXT, "every"), (SCALES, "every"))]
        own = f"`{OURS[name]}`" if name in OURS else ""
        rows.append(" | ".join((f"| `{name}`", own, *works)) + " |")
    table = "\n".join(rows).replace("|  |", "| |").replace("|  |", "| |")
    assert table in (ROOT / "docs" / "methods.md").read_text(), f"docs/methods.md needs this table:\n{table}"


@pytest.mark.usefixtures("needs_kvpress")
def test_scores_of_the_prompt_stay_and_later_tokens_leave_after_them() -> None:
    line = replace(TEXT, layers=1)
    asked = watch(KVPress("KnormPress"), line, tokens_of(line, 1, groups=GROUPS), KEPT).asked
    keys = tokens_of(line, 1, groups=GROUPS)[0][0][1][0]
    order = keys.norm(dim=-1).argsort(-1).tolist()
    for step, one in enumerate(asked):
        later = list(range(TOKENS, TOKENS + step))
        assert one.ids() == [sorted(row[: KEPT - step]) + later for row in order]


@pytest.mark.usefixtures("needs_kvpress")
@pytest.mark.parametrize(
    ("press", "settings", "message"),
    [
        ("NoPress", {}, "not a scorer of kvpress; choose from CURPress"),
        ("ThinKPress", {}, "not a scorer of kvpress"),
        ("PyramidKVPress", {}, "does not choose by its scores alone"),
        ("SnapKVPress", {"windows": 3}, r"^method.settings={'windows': 3}: SnapKVPress refuses them"),
    ],
)
def test_other_presses_are_refused(press: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PressError, match=message):
        KVPress(press, settings).check(TEXT, Budget.parse(0.3, TEXT))


@pytest.mark.usefixtures("needs_kvpress")
def test_a_press_that_fails_says_where() -> None:
    why = "^method.press=SnapKVPress cannot score layer 0 after segment 1, 1 queries and .* set method.asked=prompt"
    with pytest.raises(PressError, match=why):
        watch(KVPress("SnapKVPress", {"window_size": 8}, "every"), TEXT, tokens_of(TEXT, 1), 0.3)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presses, "find_spec", lambda _: None)
    with pytest.raises(PressError, match=r"^method=kvpress: .*; pip install \"kvbench\[kvpress"):
        KVPress().check(TEXT, Budget.parse(0.3, TEXT))


def test_of_equal_scores_the_newest_slots_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """LagKVPress, for one, gives 1 to all of its last part."""

    class Flat:
        def score(self, module: Any, hidden: Tensor, keys: Tensor, *_: Any) -> Tensor:
            return (torch.arange(keys.shape[2]) >= 20).float().expand(keys.shape[:3])

    monkeypatch.setattr(presses, "make_press", lambda *_: Flat())
    asked = watch(KVPress("Flat"), SPEC, tokens_of(SPEC, 1, groups=GROUPS), KEPT).asked
    assert asked[0].ids() == [[*range(TOKENS - KEPT, TOKENS)]] * HEADS


def test_the_ratio_gives_the_count_that_is_kept_for_all_counts() -> None:
    wrong = [
        (kept, count)
        for count in range(1, 700)
        for kept in range(1, count + 1)
        if max(1, int(count * (1 - find_ratio(kept, count)))) != kept  # `compute_n_kept` of kvpress
    ]
    assert not wrong


@pytest.mark.parametrize("padding_counts", [False, True])
def test_a_press_is_given_the_ratio_and_the_future_of_each_prompt_without_its_padding(
    monkeypatch: pytest.MonkeyPatch, padding_counts: bool
) -> None:
    padding, ahead = [0, 7, 30], 5
    line = replace(TEXT, layers=1, padding_counts=padding_counts)
    told: list[tuple[float, int, Tensor]] = []

    class Listener:
        compression_ratio = 0.0

        def score(self, module: Any, hidden: Tensor, keys: Tensor, *_: Any) -> Tensor:
            count = keys.shape[2]  # as in ExpectedAttentionPress: the future begins after the queries
            future = torch.arange(count, count + ahead)[None]
            told.append((self.compression_ratio, count, torch.stack(module.rotary_emb(hidden, future))[:, 0]))
            return torch.zeros(keys.shape[:3])

    monkeypatch.setattr(presses, "make_press", lambda *_: Listener())
    inputs, rotation = tokens_of(line, len(padding), groups=GROUPS), rotate_line(TOKENS + LATER, D, 10000.0)
    asked = watch(KVPress("Listener"), line, inputs, KEPT, padding=padding, rotation=rotation).asked
    # The newest key of every prompt is at TOKENS - 1, after its padding.
    angles = torch.arange(TOKENS, TOKENS + ahead)[:, None] * 10000.0 ** (-torch.arange(D // 2) * 2 / D)
    expected = torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)
    rows = [len(row) for row in asked[0].ids()]
    kept = map(min, rows[::HEADS], rows[1::HEADS])
    for (ratio, count, future), pad, held in zip(told, padding, kept, strict=True):
        assert (count, int(count * (1 - ratio))) == (TOKENS - pad, held)
        torch.testing.assert_close(future, expected)
