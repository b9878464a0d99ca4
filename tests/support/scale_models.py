"""Small models that draw scale by scale, with random weights, as functions of a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.cache import KVCache
from kvbench.models.base import TextFeatures
from kvbench.models.infinity.loop import draw_bit_scales
from kvbench.models.infinity.rope import compute_rotations
from kvbench.models.infinity.sampling import Sampling
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import Infinity, InfinityConfig
from kvbench.models.noise import PromptNoise
from kvbench.models.var.loop import draw_token_scales
from kvbench.models.var.sampling import VARSampling
from kvbench.models.var.tokenizer import VQVAE, VQConfig
from kvbench.models.var.transformer import VAR, VARConfig

SIDES = (1, 2, 3, 4)
SEGMENTS = next_scale([(side, side) for side in SIDES])
SPEC = ModelSpec("small", 2, 2, 16, SEGMENTS, 2)


@dataclass(frozen=True)
class Draw:
    """(cache, prompts, seed) -> the sum of codes; `words` is the length of all texts, drawn by the seed without it.

    Attributes:
        rotation: of keys, as caches have it.
        project: output projection of a layer.
    """

    run: Callable[..., Tensor]
    rotation: Tensor | None
    project: Callable[[int], Tensor]

    def __call__(self, cache: KVCache, prompts: int, seed: int, words: int | None = None) -> Tensor:
        return self.run(cache, prompts, seed, words)


def at_random(*networks: nn.Module) -> None:
    for network in networks:
        for parameter in network.eval().parameters():
            nn.init.normal_(parameter, std=0.3)


@lru_cache
def infinity() -> Draw:
    torch.manual_seed(0)
    transformer = Infinity(
        InfinityConfig(2, 32, 2, 1, 4, text_width=128, text_maxlen=8, rope_grid=(4, 4), levels=4, hidden=64)
    )
    tokenizer = BSQ(BSQConfig(bits=4, base=32, encoder_widths=(32,), decoder_widths=(32,), blocks=1))
    at_random(transformer, tokenizer)

    def draw(cache: KVCache, prompts: int, seed: int, words: int | None) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        lengths = tuple(words or int(n) for n in torch.randint(1, 9, (prompts,), generator=generator))
        text = TextFeatures(torch.randn(sum(lengths), 128, generator=generator), lengths)
        noise = PromptNoise(seed, range(prompts))
        return draw_bit_scales(transformer, tokenizer, text, SEGMENTS, cache, noise, Sampling())

    rotation = compute_rotations(SEGMENTS, (4, 4), SPEC.head_dim, 10_000.0, "cpu")
    return Draw(draw, rotation, lambda layer: transformer.layers[layer].sa.proj.weight)


@lru_cache
def var() -> Draw:
    torch.manual_seed(1)
    transformer = VAR(VARConfig(2, 32, 2, SIDES, classes=5, codes=16, channels=4))
    tokenizer = VQVAE(VQConfig(16, 4, (32,), blocks=1))
    at_random(transformer, tokenizer)

    def draw(cache: KVCache, prompts: int, seed: int, _: int | None) -> Tensor:
        labels = torch.arange(prompts) + seed % 3
        return draw_token_scales(
            transformer, tokenizer, labels, cache, PromptNoise(seed, range(prompts)), VARSampling()
        )

    return Draw(draw, None, lambda layer: transformer.layers[layer].attn.proj.weight)
