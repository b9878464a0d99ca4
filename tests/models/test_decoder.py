"""The decoder of next-token models: equal to one written head by head, on the engine as on a plain loop."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.full import Full
from kvbench.models.base import Cache
from kvbench.models.parts.decoder import Decoder, DecoderConfig, RMSNorm
from kvbench.models.parts.rotary import rotate_grid
from tests.support.engine import open_cache
from tests.support.reference_llamagen import PlainCache, decoder, golden, slow_decoder

LINE = DecoderConfig(depth=2, width=24, heads=4, kv_heads=2, head_dim=8, hidden=40, vocabulary=11)
CONFIGS = {
    "line": LINE,
    "line, normalised": replace(LINE, qk_norm="rms", rope_base=500.0),
    "line, normalised, large eps": replace(LINE, qk_norm="rms", eps=0.3),
    "line, centred": replace(LINE, qk_norm="layer"),
    "line, centred, large eps": replace(LINE, qk_norm="layer", eps=0.3),
    "line, norms behind": replace(LINE, qk_norm="layer", norm_after=True),
    "line, biases, one layer still": replace(LINE, qkv_bias=True, unrotated=(1,)),
    "grid": replace(LINE, grid=(3, 4), kv_heads=4),
    "grid, shared heads": replace(LINE, grid=(4, 3), kv_heads=1, head_dim=12),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
LENGTH = 16


def spec_of(config: DecoderConfig, *rows: int) -> ModelSpec:
    return config.describe("decoder", next_token(LENGTH - sum(rows), rows), 1)


def run(model: Decoder, x: Tensor, spec: ModelSpec, cache: Cache) -> Tensor:
    """Logits of all tokens: the prompt at once, then one token after the other."""
    rotation, found = model.config.rotations(LENGTH), []
    cache.reset(len(x))
    for segment in spec.segments:
        cache.begin(segment)
        size = segment.length if segment.index == 0 else 1
        for start in range(segment.start, segment.end, size):
            part = slice(start, start + size)
            found.append(model.logits(model(x[:, part], rotation[part], cache.attend)))
    return torch.cat(found, 1)


@each
def test_equals_a_decoder_written_head_by_head(config: DecoderConfig) -> None:
    model = decoder(config)
    x = model.tok_embeddings(torch.randint(11, (3, LENGTH), generator=torch.Generator().manual_seed(0)))
    spec = spec_of(config, 4, 4, 4)
    expected = slow_decoder(model.state_dict(), config, x).float()
    on_engine = run(model, x, spec, open_cache(Full(), spec))
    for found in (on_engine, run(model, x, spec, PlainCache())):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@each
def test_queries_as_projected_are_told(config: DecoderConfig) -> None:
    model = decoder(replace(config, depth=1, unrotated=()))
    x, seen = model.tok_embeddings(torch.arange(10)[None]), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, plain: Callable[[], Tensor]) -> Tensor:
        seen.append((q, plain()))
        return torch.zeros_like(q)

    model(x, model.config.rotations(LENGTH)[:10], attend)
    [(q, plain)] = seen
    first = model.layers[0]
    weight = first.attention.wqkv.weight[: config.heads * config.head_dim]
    normed = x if config.norm_after else first.attention_norm(x)
    expected = (normed @ weight.T).unflatten(-1, (config.heads, -1)).transpose(1, 2)
    assert plain.shape == q.shape
    torch.testing.assert_close(plain, expected)


@pytest.mark.parametrize(
    ("name", "side", "head_dim", "before"),
    [("tiny_c2i", 6, 16, 1), ("hd64_16", 16, 64, 1), ("hd100_5", 5, 100, 2)],
)
def test_rotations_are_the_official_ones(name: str, side: int, head_dim: int, before: int) -> None:
    found = rotate_grid((side, side), head_dim, 10000.0, before)
    torch.testing.assert_close(torch.view_as_real(found), golden("rope")[f"{name}.freqs"], atol=1e-6, rtol=0)


def test_norms_round_before_they_are_weighted() -> None:
    norm = RMSNorm(64, 1e-5).bfloat16()
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), exact.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), (exact * norm.weight.float()).bfloat16())
