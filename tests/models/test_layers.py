"""Layers in pieces, in place and with absorbed projections: the numbers are those of the whole."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvbench.models.base import FiniteCheck, NotFinite
from kvbench.models.parts import layers
from kvbench.models.parts.autoencoder import ImageTokenizer
from kvbench.models.parts.cross_attention import AbsorbedText, CrossAttention, TextKeys
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.layers import FeedForward
from kvbench.models.var import sampling
from kvbench.models.var.sampling import VARSampling, truncate


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("room", "pieces"), [(0, [1] * 12), (5, [5, 5, 2]), (12, [12])])
def test_the_feed_forward_in_pieces(room: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, h = FeedForward(8, 32), random(1, 2, 6, 8)
    first, second = layer.fc1, layer.fc2
    expected = F.gelu(h @ first.weight.T + first.bias, approximate="tanh") @ second.weight.T + second.bias
    seen: list[int] = []
    linear = layers.linear

    def watched(x: Tensor, *given: Any, gelu: bool = False) -> Tensor:
        seen.extend([x.numel() // 8] if gelu else [])
        return linear(x, *given, gelu=gelu)

    monkeypatch.setattr(layers, "linear", watched)
    monkeypatch.setattr(layers, "PIECE_BYTES", room * 32 * 4)
    torch.testing.assert_close(layer(h), expected)
    assert seen == [12]  # whole where gradients are wanted
    with torch.no_grad():
        found = layer(h)
    torch.testing.assert_close(found, expected.detach())
    assert seen[1:] == pieces
    assert (found.data_ptr() == h.data_ptr()) == (len(pieces) > 1)


def test_logits_are_truncated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, limits = 3 * random(0, 2, 7, 40), VARSampling(top_k=20, top_p=0.9)
    whole = truncate(logits, limits)
    assert 0 < whole.isinf().float().mean() < 1
    monkeypatch.setattr(sampling, "PIECE_BYTES", 3 * 40 * 4)
    assert torch.equal(truncate(logits, limits), whole)


def test_images_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.models.parts.decoding.PIXELS_PER_CALL", 2 * 3 * 4 * 25)
    seen: list[int] = []

    class Enlarging(ImageTokenizer):
        def decode(self, latents: Tensor) -> Tensor:
            seen.append(len(latents))
            return F.interpolate(latents, scale_factor=5)

    latents = torch.linspace(-1, 1, 5 * 3 * 12).view(5, 3, 3, 4)
    pixels = Decoding().decode(Enlarging(), latents, 5, "float32", "nearest")
    assert seen == [2, 2, 1]
    assert (pixels.shape, pixels.dtype) == ((5, 15, 20, 3), torch.uint8)
    expected = torch.linspace(0, 255, 5 * 3 * 12).round().view(5, 3, 3, 4)
    assert torch.equal(pixels[:, ::5, ::5].permute(0, 3, 1, 2).float(), expected)


def test_a_cpu_is_asked_at_once_and_a_gpu_in_the_end() -> None:
    check, logits = FiniteCheck(), torch.zeros(3, 4, 2)
    check.note(logits, 0)
    logits[2, 1] = torch.inf
    with pytest.raises(NotFinite, match="prompt 2 of the batch, segment 1"):
        check.note(logits, 1)
    check.conclude()
    check = FiniteCheck()
    check._maxima = [torch.ones(3, 1), torch.tensor([[1.0], [torch.nan], [torch.inf]])]
    with pytest.raises(NotFinite, match="prompt 1 of the batch, segment 1"):
        check.conclude()


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
    h, x, context = (torch.randn(batch, count, width) for count in (tokens, tokens, words))
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
