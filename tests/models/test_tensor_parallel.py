"""Shares of a decoder: what they compute adds up to the whole, for every kind of decoder."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.processes import Processes
from kvbench.models.files.weights import Source
from kvbench.models.parts.decoder import Decoder, DecoderConfig
from kvbench.models.parts.tensor_parallel import split_config, split_state
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config
from tests.support.reference_llamagen import decoder
from tests.support.reference_qwen3 import SHAPE, write_folder, write_tokenizer

BASE = DecoderConfig(depth=1, width=24, heads=8, kv_heads=4, head_dim=6, hidden=40, vocabulary=11)
CONFIGS = {
    "no norms of heads": BASE,
    "one norm for all heads": replace(BASE, qk_norm="rms"),
    "a norm for each head": replace(BASE, qk_norm="layer", kv_heads=8),
    "biases": replace(BASE, qkv_bias=True),
}


def attend(_: int, q: Tensor, k: Tensor, v: Tensor, plain: object = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
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


def test_one_share_is_the_whole() -> None:
    state = decoder(BASE).state_dict()
    assert split_state(state, BASE, 0, 1) == dict(state)
    assert split_config(BASE, 1) == BASE


@pytest.mark.parametrize(
    ("count", "named"), [(3, "heads=8"), (8, "kv_heads=4"), (4, "hidden=42"), (0, "heads=8")]
)
def test_processes_that_do_not_divide_are_refused(count: int, named: str) -> None:
    hidden = 42 if named.startswith("hidden") else 40
    shape = Qwen3Config(depth=1, width=24, heads=8, kv_heads=4, head_dim=6, hidden=hidden, vocabulary=11)
    message = f"model.tensor_parallel={count}: must divide model.transformer.{named}"
    with pytest.raises(ValueError, match=re.escape(message)):
        Qwen3Model("small", shape, TextSampling(), {}, "random", tensor_parallel=count)


def test_a_share_is_read_out_of_the_files_of_the_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = SHAPE
    write_folder(tmp_path)
    write_tokenizer(tmp_path)
    sources = {"weights": Source("model.sources.weights", str(tmp_path))}

    def load(processes: Processes) -> Qwen3Model:
        one = Qwen3Model("small", shape, TextSampling(0), sources, tensor_parallel=processes.count)
        one.processes = processes
        one.load("cpu")
        return one

    model = load(Processes())
    state, dim = model._transformer.state_dict(), shape.head_dim
    for rank in range(2):
        share = load(Processes(rank, 2))
        assert share.weights_sha256 == model.weights_sha256
        assert share.parameters == model.parameters
        found = share._transformer.state_dict()
        assert found.keys() == state.keys()
        heads = state["layers.0.attention.wqkv.weight"].unflatten(0, (-1, dim))
        ours = found["layers.0.attention.wqkv.weight"].unflatten(0, (-1, dim))
        half, kv = shape.heads // 2, shape.kv_heads // 2
        assert torch.equal(ours[:half], heads[rank * half : (rank + 1) * half])
        first = shape.heads + rank * kv
        assert torch.equal(ours[half : half + kv], heads[first : first + kv])
        first += shape.kv_heads
        assert torch.equal(ours[half + kv :], heads[first : first + kv])
