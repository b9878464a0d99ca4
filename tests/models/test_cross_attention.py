"""Attention over the text: as defined, whether its projections are absorbed or not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.models.parts.cross_attention import AbsorbedText, CrossAttention, TextKeys


def defined(cross: CrossAttention, h: Tensor, context: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    """Head by head and sequence by sequence, in double precision."""
    width, heads = len(cross.v_bias), cross.heads
    dim = width // heads
    weights = {name: value.detach().double() for name, value in cross.named_parameters()}
    out = x.double().clone()
    for one, (tokens, words, exist) in enumerate(zip(h.double(), context.double(), mask, strict=True)):
        joined = []
        for head in range(heads):
            rows = slice(head * dim, (head + 1) * dim)
            q = tokens @ weights["mat_q.weight"][rows].T + weights["mat_q.bias"][rows]
            k = words[exist] @ weights["mat_kv.weight"][:width][rows].T
            v = words[exist] @ weights["mat_kv.weight"][width:][rows].T + weights["v_bias"][rows]
            joined.append((q @ k.T / dim**0.5).softmax(1) @ v)
        out[one] += torch.cat(joined, 1) @ weights["proj.weight"].T + weights["proj.bias"]
    return out


@given(
    st.integers(0, 10**6), st.integers(1, 3), st.sampled_from((1, 3, 20)), st.integers(1, 4),
    st.sampled_from((8, 16)), st.integers(1, 30), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_it_is_what_it_is_defined_as(
    seed: int, batch: int, tokens: int, heads: int, dim: int, words: int, learning: bool
) -> None:
    torch.manual_seed(seed)
    width = heads * dim
    cross = CrossAttention(width, heads)
    for value in cross.parameters():
        torch.nn.init.normal_(value, std=width**-0.5)
    h, x, context = (
        torch.randn(batch, tokens, width),
        torch.randn(batch, tokens, width),
        torch.randn(batch, words, width),
    )
    mask = torch.rand(batch, words) < 0.6
    mask[:, torch.randint(words, ())] = True
    with torch.set_grad_enabled(learning):
        text = cross.prepare(context, mask)
        assert isinstance(text, AbsorbedText if words * (heads - 1) < width else TextKeys)
        found = cross(h, text, x.clone())
    torch.testing.assert_close(found.double(), defined(cross, h, context, mask, x), atol=2e-5, rtol=1e-5)


def test_where_the_official_program_rounds_queries_nothing_is_absorbed() -> None:
    text = CrossAttention(32, 2).bfloat16().prepare(torch.randn(1, 3, 32), torch.ones(1, 3, dtype=torch.bool))
    assert isinstance(text, TextKeys)
