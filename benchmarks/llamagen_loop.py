"""Tokens per second of next-token decoding: the engine against the official program's loop, on the same weights.

python -m benchmarks llamagen_loop [--model llamagen_tiny] [--batch 8] [--threads 2] [--budgets 1,0.167] [overrides]
The official loop (LlamaGen's `generate.py`) has zero-initialised dense buffers of keys and values for the whole
sequence; every step attends over all slots under a mask, in plain operations. Generations take turns in one process.
The table has the median seconds, image tokens per second, and the official loop's time relative to each. `--slope` also
prints the growth of a step's time with earlier tokens.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.support.arguments import OVERRIDES
from benchmarks.support.build import build_model, built, composed, prepare_method
from benchmarks.support.table import Table
from benchmarks.support.timing import Clock, choose_clock, take_turns
from kvbench.core.segments import Segment
from kvbench.engine.cache import KVCache
from kvbench.models.image_loop import draw_image_tokens
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.transformer import LlamaGen
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.sampling import guide, truncate
from kvbench.models.qwen3.model import Qwen3Model


class OfficialLoop:
    """LlamaGen's official generation loop, on our weights."""

    def __init__(self, transformer: LlamaGen, sampling: LlamaGenSampling) -> None:
        self.transformer, self.sampling = transformer, sampling

    @torch.inference_mode()
    def generate(self, condition: Tensor) -> Tensor:
        """Generate image tokens int64 [prompts, tokens] after a condition [sequences, tokens, width]."""
        config = self.transformer.config
        sequences, before, _ = condition.shape
        slots = -(-(before + config.tokens) // 8) * 8
        shape = (sequences, config.kv_heads, slots, config.head_dim)
        self._cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.depth)]
        rotation = torch.view_as_real(config.rotations(before + config.tokens))
        causal = torch.ones(slots, slots, dtype=torch.bool).tril().expand(sequences, -1, -1).clone()
        x, position, drawn = condition, torch.arange(before), []
        while len(drawn) < config.tokens:
            logits = self._step(x, position, rotation[position], causal[:, None, position])
            guided = truncate(guide(logits, self.sampling, len(drawn)), self.sampling)
            drawn.append(torch.multinomial(guided.softmax(-1), 1)[:, 0])
            x = self.transformer.tok_embeddings(drawn[-1]).repeat(self.sampling.branches, 1)[:, None]
            position = position[-1:] + 1
        return torch.stack(drawn, 1)

    def _step(self, x: Tensor, position: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        """Run the current tokens; return the logits of the last one, float32 [sequences, vocabulary]."""
        config = self.transformer.config
        for layer, block in enumerate(self.transformer.layers):
            attention, feed, (keys, values) = block.attention, block.feed_forward, self._cache[layer]
            joint = F.linear(_normalise(x, block.attention_norm), attention.wqkv.weight)
            q, k, v = joint.split(
                [heads * config.head_dim for heads in (config.heads, *[config.kv_heads] * 2)], -1
            )
            q, k, v = (heads.unflatten(-1, (-1, config.head_dim)) for heads in (q, k, v))
            q, k, v = (heads.transpose(1, 2) for heads in (_rotate(q, rotation), _rotate(k, rotation), v))
            keys[:, :, position], values[:, :, position] = k, v
            with sdpa_kernel(SDPBackend.MATH) if x.shape[1] == 1 else nullcontext():
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + F.linear(out.transpose(1, 2).flatten(2), attention.wo.weight)
            hidden = _normalise(x, block.ffn_norm)
            gated = F.silu(F.linear(hidden, feed.w1.weight)) * F.linear(hidden, feed.w3.weight)
            x = x + F.linear(gated, feed.w2.weight)
        return F.linear(_normalise(x, self.transformer.norm), self.transformer.output.weight)[:, -1].float()


def _normalise(x: Tensor, norm: torch.nn.Module) -> Tensor:
    single = x.float()
    eps, weight = norm.eps, norm.weight
    assert isinstance(eps, float)
    assert isinstance(weight, Tensor)
    return (single * torch.rsqrt(single.square().mean(-1, keepdim=True) + eps)).type_as(x) * weight


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads [sequences, tokens, heads, D] by cosines and sines [tokens, D/2, 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = rotation[:, None].unbind(-1)
    a, b = pairs.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).type_as(x)


def prepare_cache(
    model: LlamaGenModel | Qwen3Model, name: str, budget: str, overrides: Sequence[str] = ()
) -> KVCache:
    """Open a cache with a method of `conf/method`; `overrides` change the method's settings."""
    settings = [f"method={name}", f"sinks={model.default_sinks}", *overrides]
    return KVCache(model.spec, prepare_method(model.spec, budget, settings), dtype=torch.float32)


def read_prompts(model: LlamaGenModel, count: int) -> list[str]:
    """Return prompts of a model: captions of scenes, or class numbers."""
    if model.text is None:
        return [str(label) for label in range(count)]
    return [prompt.text for prompt in built({**composed()["prompts"], "count": count}).load()]


def measure_slope(
    cache: KVCache, model: LlamaGenModel | Qwen3Model, run: Callable[[], object], repeats: int, clock: Clock
) -> Tensor:
    """Measure the time of a step by earlier tokens; return float64 [segments after the prompt, 2].

    Columns: tokens before the middle of a segment, median seconds of its steps.
    """
    rounds, stamps, begin = [], list[float](), cache.begin

    def stamped(segment: Segment) -> None:
        stamps.append(clock())
        begin(segment)

    with patch.object(cache, "begin", stamped):
        for _ in range(repeats):
            stamps.clear()
            run()
            rounds.append([*stamps, clock()])
    seconds = torch.tensor(rounds, dtype=torch.float64).diff(dim=1).median(0).values[1:]
    lengths = torch.tensor(model.spec.lengths[1:], dtype=torch.float64)
    middle = torch.tensor([s.start for s in model.spec.segments[1:]], dtype=torch.float64) + lengths / 2
    return torch.stack((middle, seconds / lengths), 1)


def print_slope(name: str, points: Tensor) -> None:
    """Print the growth of a step's time with earlier tokens (`measure_slope`)."""
    slope, start = np.polyfit(*points.T.numpy(), 1)
    shortest, longest = points[:, 1].aminmax()
    print(
        f"{name}, a step: {1e3 * shortest:.2f} to {1e3 * longest:.2f} ms, {1e3 * start:.2f} ms "
        f"+ {1e6 * slope:.3f} us for every token before it"
    )


OPTIONS = {
    "model": "llamagen_tiny", "batch": 8, "threads": 2, "budget": "0.1667",
    "methods": "linear_ar,headkv,snapkv,streaming_llm", "repeats": 7, "slope": False, **OVERRIDES,
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    model = build_model(options.model, *options.overrides)
    assert isinstance(model, LlamaGenModel)
    model.load("cpu")
    transformer, config, sampling = model._transformer, model.transformer, model.sampling
    tokens, padding = model._read(read_prompts(model, options.batch))
    if padding is not None:
        raise ValueError(
            f"--model {options.model}: the official loop needs prompts of equal length; choose another model"
        )
    condition = transformer.cls_embedding(tokens, guided=sampling.branches > 1)

    def draw_on_engine(cache: KVCache) -> object:
        noise = PromptNoise(0, range(options.batch))
        return draw_image_tokens(transformer, condition, model.spec.segments, cache, noise, sampling)

    full = prepare_cache(model, "full", "1")
    runs: dict[str, Callable[[], object]] = {
        "official loop": partial(OfficialLoop(transformer, sampling).generate, condition),
        "full": partial(draw_on_engine, full),
    }
    for name in options.methods.split(","):
        cache = prepare_cache(model, name, options.budget)
        runs[f"{name} {options.budget}"] = partial(draw_on_engine, cache)
    times = take_turns(runs, options.repeats, choose_clock(False))
    print(f"{model.name}: {config.tokens} tokens an image, batch {options.batch}, {options.threads} threads")
    table = Table({"s": ".3f", "tokens/s": ".0f", "official over it": ".2f"}, width=24)
    for name, (seconds, _) in times.items():
        base = times["official loop"].seconds
        table.add(name, seconds, options.batch * config.tokens / seconds, base / seconds)
    if options.slope:
        print_slope("full", measure_slope(full, model, runs["full"], options.repeats, choose_clock(False)))
