"""Support of the tests of LlamaGen: the official tensors, weights by formula, and a decoder written a second time."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import Segment
from kvbench.models.files.official_files import clean_decoder, clean_vqgan
from kvbench.models.files.parameters import build_on_meta, fill_random
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.parts.decoder import Decoder, DecoderConfig, PerHeadNorm, RMSNorm
from tests.support.places import GOLDENS
from tests.support.published import read_meta, read_published, read_tensors

GOLDEN = GOLDENS / "llamagen"
meta, published = (partial(read, "llamagen") for read in (read_meta, read_published))
golden = partial(read_tensors, "llamagen")
GAINS = {"wqkv": 1.8, "output": 2.5, "decoder.conv_out": 0.6, "encoder.conv_out": 1.5}
SEEDS = {"t2i_tiny": 5}
M = TypeVar("M", bound=nn.Module)


def formula(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """The reference models' weight of an official name: normal numbers seeded by the name, exact in float16."""
    mean, spread = 0.0, 1.0
    layer, _, kind = name.rpartition(".")
    if "norm" in layer.split(".")[-1]:
        mean, spread = (1.0, 0.2) if kind == "weight" else (0.0, 0.2)
    elif kind == "bias":
        spread = 0.1
    elif not (name.endswith("uncond_embedding") or "embedding" in layer.split(".")[-1]):
        ending = next((end for end in GAINS if layer.endswith(end)), "")
        usual = 1.2 if "conv" in name or len(shape) == 4 else 1.0
        spread = GAINS.get(ending, usual) / math.sqrt(math.prod(shape[1:]))
    generator = np.random.RandomState((zlib.crc32(name.encode()) + 1000003 * seed) % 2**32)
    return torch.from_numpy((generator.standard_normal(shape) * spread + mean).astype(np.float16)).float()


def is_earlier(query: int, key: int) -> bool:
    return key <= query


class PlainCache:
    """Keys and values that grow by `torch.cat`, under an explicit mask as in the official program.

    A token that does not exist sees itself and is seen by none.

    Args:
        sees: whether a query sees a key, by their places.
        scale: of products; that of the heads' channels by default.
    """

    repetitions = None

    def __init__(self, sees: Callable[[int, int], bool] = is_earlier, scale: float | None = None) -> None:
        self._sees, self._scale = sees, scale

    def open_steps(self) -> None:
        """Each step runs by itself."""

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        self.past: dict[int, tuple[Tensor, Tensor]] = {}
        self._padding = torch.tensor([0] * sequences if padding is None else padding)

    def begin(self, segment: Segment) -> None:
        pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plain: object = None) -> Tensor:
        tokens = k.shape[2]
        if layer in self.past:
            k, v = (torch.cat((old, new), 2) for old, new in zip(self.past[layer], (k, v), strict=True))
        self.past[layer] = (k, v)
        end = k.shape[2]
        seen = torch.tensor(
            [[self._sees(row, key) for key in range(end)] for row in range(end - tokens, end)]
        )
        seen = seen & (torch.arange(end) >= self._padding[:, None, None, None])
        seen |= torch.eye(end, dtype=torch.bool)[end - tokens :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self._scale, enable_gqa=True)


def decoder(config: DecoderConfig) -> Decoder:
    """Random weights, norms' too."""
    model = build_on_meta(lambda: Decoder(config))
    fill_random(model)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, RMSNorm | PerHeadNorm):
            module.weight.data = 1 + 0.3 * torch.randn(module.weight.shape, generator=generator)
        if isinstance(module, PerHeadNorm):
            module.bias.data = 0.3 * torch.randn(module.bias.shape, generator=generator)
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            module.bias.data = torch.randn(module.bias.shape, generator=generator)
    return model.requires_grad_(False)


def slow_decoder(state: Mapping[str, Tensor], config: DecoderConfig, x: Tensor) -> Tensor:
    """Hidden states of embedded tokens [B, tokens, width], in double precision, one head and one token at a time."""
    x, weights = x.double(), {name: tensor.double() for name, tensor in state.items()}
    before = x.shape[1] - math.prod(config.grid or (0,))
    for i in range(config.depth):
        first, second = (
            partial(slow_norm, weight=weights[f"layers.{i}.{name}.weight"], eps=config.eps)
            for name in ("attention_norm", "ffn_norm")
        )
        h = x if config.norm_after else first(x)
        joint = h @ weights[f"layers.{i}.attention.wqkv.weight"].T
        if config.qkv_bias:
            joint = joint + weights[f"layers.{i}.attention.wqkv.bias"]
        heads = joint.unflatten(-1, (-1, config.head_dim))
        out = torch.zeros(*x.shape[:2], config.heads, config.head_dim, dtype=torch.float64)
        for head in range(config.heads):
            group = head * config.kv_heads // config.heads
            q, k, v = (
                heads[:, :, one]
                for one in (head, config.heads + group, config.heads + config.kv_heads + group)
            )
            if config.qk_norm == "layer":
                q = slow_head_norm(q, weights, f"layers.{i}.attention.q_norm", head, config)
                k = slow_head_norm(k, weights, f"layers.{i}.attention.k_norm", group, config)
            elif config.qk_norm == "rms":
                q = slow_norm(q, weights[f"layers.{i}.attention.q_norm.weight"], config.eps)
                k = slow_norm(k, weights[f"layers.{i}.attention.k_norm.weight"], config.eps)
            if i not in config.unrotated:
                q, k = (slow_turn(one, config, before) for one in (q, k))
            for token in range(x.shape[1]):
                scores = (k[:, : token + 1] @ q[:, token, :, None])[..., 0] / math.sqrt(config.head_dim)
                out[:, token, head] = (scores.softmax(-1)[:, None] @ v[:, : token + 1])[:, 0]
        attended = out.flatten(2) @ weights[f"layers.{i}.attention.wo.weight"].T
        x = x + (first(attended) if config.norm_after else attended)
        h = x if config.norm_after else second(x)
        gate, up = (h @ weights[f"layers.{i}.feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        fed = (gate * gate.sigmoid() * up) @ weights[f"layers.{i}.feed_forward.w2.weight"].T
        x = x + (second(fed) if config.norm_after else fed)
    return slow_norm(x, weights["norm.weight"], config.eps) @ weights["output.weight"].T


def slow_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def slow_head_norm(
    x: Tensor, weights: Mapping[str, Tensor], name: str, head: int, config: DecoderConfig
) -> Tensor:
    """Layer norm of one head."""
    own = slice(head * config.head_dim, (head + 1) * config.head_dim)
    x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt()
    return scaled * weights[f"{name}.weight"][own] + weights[f"{name}.bias"][own]


def slow_turn(x: Tensor, config: DecoderConfig, before: int) -> Tensor:
    """Turn [B, tokens, D], pair by pair."""
    out = x.clone()
    half = config.head_dim // 2
    for token in range(x.shape[1]):
        for pair in range(half):
            if config.grid is None:
                angle = token * config.rope_base ** (-2 * pair / config.head_dim)
            elif token < before:
                out[:, token] = 0
                continue
            else:
                row, column = divmod(token - before, config.grid[1])
                where, j = (row, pair) if pair < half // 2 else (column, pair - half // 2)
                angle = where * config.rope_base ** (-2 * j / half)
            a, b = x[:, token, 2 * pair], x[:, token, 2 * pair + 1]
            out[:, token, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            out[:, token, 2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


_SHAPE = {"depth": 4, "width": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "hidden": 256}
CONFIGS = {"c2i": LlamaGenConfig(**_SHAPE, vocabulary=128, grid=(6, 6), classes=10)}
CONFIGS["t2i"] = replace(CONFIGS["c2i"], text_width=24)
TINY_VQ = VQConfig(codes=128, channels=8, latents=32, widths=(32, 32, 64))
FULL_VQ = VQConfig(codes=16384, channels=8, latents=256, widths=(128, 128, 256, 256, 512))


@lru_cache
def official_state(name: str) -> dict[str, Tensor]:
    """The state of a reference model by official names: `c2i_tiny`, `t2i_tiny`, `vq_tiny` or `vq_16`."""
    keys, seed = published()[name]["keys"], SEEDS.get(name, 0)
    return {key: formula(key, tuple(shape), seed) for key, (shape, _) in keys.items() if "_used" not in key}


def transformer(kind: str) -> LlamaGen:
    """The tiny transformer `c2i` or `t2i`."""
    return filled(LlamaGen(CONFIGS[kind]), clean_decoder(official_state(f"{kind}_tiny")))


@lru_cache
def tokenizer(config: VQConfig = TINY_VQ) -> VQ:
    """A tokenizer with the formula's weights, of the tiny or the published shape."""
    return filled(VQ(config), clean_vqgan(official_state("vq_tiny" if config == TINY_VQ else "vq_16")))


def filled(model: M, state: dict[str, Tensor]) -> M:
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
