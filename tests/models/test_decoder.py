"""The decoder of next-token models, equal to one written head by head, and shares of it, which add up to the whole."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.processes import Processes
from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.full import Full
from kvbench.models.base import Cache
from kvbench.models.files.weights import Source
from kvbench.models.parts.decoder import Decoder, DecoderConfig, RMSNorm
from kvbench.models.parts.rotary import rotate_grid
from kvbench.models.parts.tensor_parallel import split_config, split_state
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config
from tests.support.engine import open_cache
from tests.support.reference_llamagen import PlainCache, decoder, golden, slow_decoder
from tests.support.reference_qwen3 import SHAPE, write_folder, write_tokenizer

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


def test_rotations_are_the_official_ones() -> None:
    for name, side, head_dim, before in (
        ("tiny_c2i", 6, 16, 1),
        ("hd64_16", 16, 64, 1),
        ("hd100_5", 5, 100, 2),
    ):
        found = torch.view_as_real(rotate_grid((side, side), head_dim, 10000.0, before))
        torch.testing.assert_close(found, golden("rope")[f"{name}.freqs"], atol=1e-6, rtol=0)


def test_norms_round_before_they_are_weighted() -> None:
    norm = RMSNorm(64, 1e-5).bfloat16()
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), exact.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), (exact * norm.weight.float()).bfloat16())


BASE = DecoderConfig(depth=1, width=24, heads=8, kv_heads=4, head_dim=6, hidden=40, vocabulary=11)
SHARED = {
    "no norms of heads": BASE,
    "one norm for all heads": replace(BASE, qk_norm="rms"),
    "a norm for each head": replace(BASE, qk_norm="layer", kv_heads=8),
    "biases": replace(BASE, qkv_bias=True),
}


def attend(_: int, q: Tensor, k: Tensor, v: Tensor, plain: object = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("config", SHARED.values(), ids=SHARED)
def test_what_shares_compute_adds_up_to_the_whole(config: DecoderConfig, count: int) -> None:
    model, x = decoder(config), torch.randn(2, 5, config.width)
    shares = []
    for rank in range(count):
        share = Decoder(split_config(config, count))
        share.load_state_dict(split_state(model.state_dict(), config, rank, count))
        shares.append(share.requires_grad_(False))
    rotation = config.rotations(5)
    for name, given in (("attention", (x, 0, rotation, attend)), ("feed_forward", (x,))):
        expected = getattr(model.layers[0], name)(*given)
        parts = [getattr(share.layers[0], name)(*given) for share in shares]
        torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-6)
        assert (parts[0] - expected / count).abs().max() > 1e-2
    for name in ("tok_embeddings", "output", "norm"):
        assert all(torch.equal(getattr(s, name).weight, getattr(model, name).weight) for s in shares)
    assert sum(p.numel() for s in shares for p in s.layers.parameters()) >= sum(
        p.numel() for p in model.layers.parameters()
    )


@pytest.mark.parametrize("count", [1, 2])
def test_one_product_computes_the_gate_and_its_factor(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole layer and of a share; the weights keep their names, values and number."""
    share, x = Decoder(split_config(BASE, count)), torch.randn(2, 5, BASE.width)
    share.load_state_dict(split_state(decoder(BASE).state_dict(), BASE, count - 1, count))
    layer, state = share.layers[0].feed_forward, {k: v.clone() for k, v in share.state_dict().items()}
    expected = layer.w2(F.silu(layer.w1(x)) * layer.w3(x))
    share.prepare_for("cpu")
    assert layer._joint is None
    share.prepare_for("cuda")
    sizes: list[int] = []

    def note(x: Tensor, weight: Tensor, bias: None) -> Tensor:
        sizes.append(len(weight))
        return F.linear(x, weight, bias)

    monkeypatch.setattr("kvbench.models.parts.decoder.linear", note)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert sizes == [2 * BASE.hidden // count, BASE.width]
    assert {name: tensor.tolist() for name, tensor in share.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    assert layer.w3.weight.untyped_storage().data_ptr() == layer.w1.weight.untyped_storage().data_ptr()


def test_processes_that_do_not_divide_are_refused() -> None:
    shape = Qwen3Config(depth=1, width=24, heads=8, kv_heads=4, head_dim=6, hidden=42, vocabulary=11)
    for count, named in ((3, "heads=8"), (8, "kv_heads=4"), (4, "hidden=42"), (0, "heads=8")):
        message = f"model.tensor_parallel={count}: must divide model.transformer.{named}"
        with pytest.raises(ValueError, match=re.escape(message)):
            Qwen3Model("small", shape, TextSampling(), {}, "random", tensor_parallel=count)


def test_a_share_is_read_out_of_the_files_of_the_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_folder(tmp_path)
    write_tokenizer(tmp_path)
    sources = {"weights": Source("model.sources.weights", str(tmp_path))}

    def load(processes: Processes) -> Qwen3Model:
        one = Qwen3Model("small", SHAPE, TextSampling(0), sources, tensor_parallel=processes.count)
        one.processes = processes
        one.load("cpu")
        return one

    model = load(Processes())
    whole = model._transformer.state_dict()
    for rank in range(2):
        share = load(Processes(rank, 2))
        assert share.weights_sha256 == model.weights_sha256
        assert share.parameters == model.parameters
        found, expected = share._transformer.state_dict(), split_state(whole, SHAPE, rank, 2)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
