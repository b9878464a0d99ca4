"""The comparison with kvpress: readings of transformers and of the engine, and what is counted of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import exp, inf, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import kvpress_agreement
from benchmarks.support.build import built, composed
from benchmarks.support.kvpress_reading import PressResult, build_llama, read_on_engine, read_with_press
from benchmarks.support.kvpress_rows import count_unequal, measure_gap, measure_kl
from benchmarks.support.kvpress_twins import TWINS, Twin
from kvbench.core.segments import ModelSpec
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.parts.text_decoder import TextDecoderConfig
from kvbench.models.parts.text_sampling import TextSampling
from kvbench.models.qwen3.model import Qwen3Model
from tests.support.engine import prepared

GIVEN, KEPT, FIRST = 20, 9, 4
SHAPE = TextDecoderConfig(
    depth=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=64, qk_norm="none",
    eps=1e-5, rope_base=1e4, tied=True,
)  # fmt: skip


class WindowPress:
    """Keeps the first and the newest tokens of the prompt, in the reverse order."""

    def score(self) -> None: ...

    @contextmanager
    def __call__(self, llama: Any) -> Iterator[None]:
        def shorten(module: Any, inputs: Any, kwargs: Any, output: Any) -> None:
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            if layer.keys.shape[2] == GIVEN:
                kept = torch.tensor([*range(GIVEN - 1, GIVEN - 1 - KEPT + FIRST, -1), *range(FIRST)])
                layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

        hooks = [one.self_attn.register_forward_hook(shorten, with_kwargs=True) for one in llama.model.layers]
        yield
        for hook in hooks:
            hook.remove()


@cache
def model() -> Qwen3Model:
    sampling = TextSampling(temperature=0, top_k=0, top_p=1)
    tiny = Qwen3Model("tiny", SHAPE, sampling, {}, "random", prompt_tokens=GIVEN, max_tokens=30, chunk=8)
    tiny.count_padding = False
    tiny.load("cpu")
    for parameter in tiny._transformer.parameters():  # random weights hardly attend to anything
        parameter.data.mul_(8)
    return tiny


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("window", [False, True])
def test_transformers_and_the_engine_read_a_text_alike(window: bool, padding: int) -> None:
    tokens = torch.randint(2, 64, (GIVEN + 6,), generator=torch.Generator().manual_seed(0)).tolist()

    def prepare(spec: ModelSpec) -> Method:
        return (
            prepared(StreamingLLM(sinks=0, leading=FIRST), spec, KEPT) if window else prepared(Full(), spec)
        )

    press = WindowPress() if window else None
    theirs = read_with_press(build_llama(model(), "sdpa"), press, tokens, GIVEN)
    ours = read_on_engine(model(), prepare, tokens, GIVEN, padding)
    wanted = {*range(FIRST), *range(GIVEN - KEPT + FIRST, GIVEN)} if window else set(range(GIVEN))
    assert theirs.kept == ours.kept == [[wanted] * 2] * 2
    assert theirs.logits.abs().max() > 0.1
    torch.testing.assert_close(theirs.logits, ours.logits, atol=1e-4, rtol=1e-4)


def reading(kept: list[set[int]], logits: list[float], *scores: Tensor) -> PressResult:
    return PressResult([kept], torch.tensor([logits]), 0.0, list(scores))


def test_what_is_counted() -> None:
    scores = torch.tensor([[1.0, 2.0, 4.0, 3.0], [5.0, 5.0, 0.0, 9.0]])
    theirs = reading([{2, 3}, {0, 3}], [0.0, 0.0], scores)
    assert count_unequal(theirs, theirs) == 0
    tied, other = reading([{2, 3}, {1, 3}], [0.0, 0.0]), reading([{1, 2}, {1, 3}], [log(3), 0.0])
    assert (count_unequal(theirs, tied), count_unequal(theirs, other)) == (1, 2)
    assert measure_gap(theirs, tied) == 0  # 5 and 5
    assert measure_gap(theirs, other) == pytest.approx(1 / 3)  # 3 in place of 2, and a tie
    assert measure_gap(theirs, reading([{2}, {0, 3}], [0.0, 0.0])) == inf
    # Halves beside three quarters and a quarter.
    assert exp(measure_kl(theirs, other)) == pytest.approx((4 / 3) ** 0.5)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.method)
def test_a_twin_is_the_same_method_whatever_defaults_a_model_has(twin: Twin) -> None:
    """SnapKVPress's softmax is over all keys, and its scores are means over query heads (kvpress's snapkv_press.py)."""
    models = ("smollm2_135m", "infinity_tiny")
    on_texts, on_images = (
        composed([f"model={name}", *twin.list_overrides(0.75)])["method"] for name in models
    )
    assert isinstance(built(on_texts), Method)
    assert on_texts == on_images
    own = on_texts.get("base", on_texts)
    if "SnapKVPress" in (twin.press, *(twin.inner or ())):
        assert (own["softmax"], own["group"], own["queries"]) == ("all", "mean", "last")


def test_texts_are_as_long_as_asked() -> None:
    def encode(most: int) -> Any:
        return SimpleNamespace(_text=SimpleNamespace(encode=lambda text: list(text.encode())[:most]))

    prompts = composed(["prompts=texts", "prompts.count=2", "prompts.length=540", "prompts.given=538"])[
        "prompts"
    ]
    texts = kvpress_agreement._read_texts(encode(10**6), prompts)
    assert [len(text) for text in texts] == [540, 540]
    assert texts[0] != texts[1]
    with pytest.raises(ValueError, match="--given: a text has fewer than 540"):
        kvpress_agreement._read_texts(encode(539), prompts)
