"""Tokens that next-token loops put into a cache, against one pass over the prompt and all drawn tokens.

Tokens are the likeliest ones, so the pass gives them too: at which place a token is drawn, which token enters next and
how prompts are padded all decide them. Next-scale loops are compared with official programs, scale by scale, in
`infinity/test_transformer.py` and `var/test_transformer.py`.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.models.noise import PromptNoise
from kvbench.models.parts.tokens import lay_out
from tests.models.test_small_models import CASES
from tests.support.reference_llamagen import PlainCache
from tests.support.small_models import SMALL_QWEN3, load

IMAGES = ("janus", "lumina", "emu3", "llamagen", "llamagen with captions")
TEXTS = (*SMALL_QWEN3, "model.max_tokens=20", "model.sampling.temperature=0", "model.stop=false")


def compare(
    model: Any,
    condition: Tensor,
    padding: Sequence[int] | None,
    tokens: Tensor,
    branches: int,
    used: PlainCache,
) -> Tensor:
    """Compare what is in the cache with one pass; return its logits at the places of drawn tokens."""
    network, cache = model._transformer, PlainCache()
    drawn = network.embed(tokens[:, :-1]).repeat(branches, 1, 1)
    x = torch.cat((condition, drawn), 1)
    cache.reset(len(x), padding)
    rotation = network.rotations(model.spec.segments[-1].end + 1)
    states = network(x, rotation[: x.shape[1]], cache.attend)
    assert set(cache.past) == set(used.past) == set(range(model.spec.layers))
    for layer, pair in used.past.items():
        for found, expected in zip(pair, cache.past[layer], strict=True):
            for sequence, begin in enumerate(padding or [0] * len(x)):
                found_row, expected_row = found[sequence, :, begin:], expected[sequence, :, begin:]
                torch.testing.assert_close(found_row, expected_row, rtol=1e-4, atol=1e-4)
    logits: Tensor = network.logits(states[:, condition.shape[1] - 1 :])
    return logits


@pytest.mark.parametrize("case", IMAGES)
@torch.inference_mode()
def test_an_image_is_drawn_from_its_prompt_and_all_tokens_before(case: str) -> None:
    given = CASES[case]
    model = load(*given.overrides, "model.sampling.top_k=1")
    prompts, branches, used = given.prompts[:2], model.sampling.branches, PlainCache()
    condition, padding = model._embed(prompts)
    tokens = model._draw_tokens(condition, padding, used, PromptNoise(0, (0, 1)))
    logits = compare(model, condition, padding, tokens, branches, used)
    conditional, unconditional = logits.chunk(2) if branches == 2 else (logits, logits)
    guided = unconditional + model.sampling.cfg * (conditional - unconditional)
    if (forbid := model._forbid()) is not None:
        masks = torch.stack([forbid(number) for number in range(tokens.shape[1])])
        guided = guided.masked_fill(masks, -torch.inf)
    assert torch.equal(tokens, guided.argmax(-1))


@torch.inference_mode()
def test_a_text_is_written_from_its_prompt_and_all_tokens_before() -> None:
    model, used = load(*TEXTS), PlainCache()
    prompts = ["what is one plus two", "why"]
    drawn = model._draw(*lay_out(prompts, model._text, model.prompt_tokens), used, PromptNoise(0, (0, 1)))
    own = [model._text.encode(prompt) for prompt in prompts]
    padding = [model.prompt_tokens - len(row) for row in own]
    assert len(set(padding)) == 2
    rows = [[0] * count + row for count, row in zip(padding, own, strict=True)]
    condition = model._transformer.embed(torch.tensor(rows))
    tokens = torch.tensor(drawn.rows())
    logits = compare(model, condition, padding, tokens, 1, used)
    assert torch.equal(tokens, logits.argmax(-1))
