"""Tokens per second of texts: the engine against transformers' `generate` with its dynamic cache, on the same weights.

python -m benchmarks generate_loop [--model qwen3_4b] [--batch 8] [--tokens 2000] [--threads 2]
                                   [--methods hard_kv] [--budget 0.25] [--repeats 3] [--slope] [--cpu-time]
                                   [overrides]
Without `--model` it is a small Qwen3 with random weights; overrides change its shape (model.transformer.depth=8).
Prompts are random tokens, decoding is greedy, and all texts have full length. Generations take turns in one process.
The table has the median seconds, tokens per second, transformers' time relative to each, the number of first tokens
that equal transformers' in all texts, and the peak share of tokens in the cache. `--slope` also prints the growth of a
step's time with earlier tokens. A budget up to 1 is a share of the full cache; above 1 it is tokens per head.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.llamagen_loop import measure_slope, prepare_cache, print_slope
from benchmarks.support.arguments import OVERRIDES
from benchmarks.support.build import built, composed
from benchmarks.support.table import Table
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.engine.cache import KVCache
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.decoder_files import split_decoder
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.text_loop import draw_text_tokens

SMALL_SHAPE = {
    "depth": 4, "width": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 384, "vocabulary": 512,
}  # fmt: skip
"""Shape of the default model."""
PROMPT_TOKENS = 32
"""Tokens of its prompts."""


def open_in_transformers(transformer: TextDecoder) -> Any:
    """Return transformers' model with our weights."""
    import transformers

    config = transformer.config
    settings = transformers.Qwen3Config(
        vocab_size=config.vocabulary, hidden_size=config.width, intermediate_size=config.hidden,
        num_hidden_layers=config.depth, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, rms_norm_eps=config.eps, tie_word_embeddings=config.tied,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        max_position_embeddings=1 << 17, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(settings).eval().requires_grad_(False)
    model.load_state_dict(split_decoder(transformer.state_dict(), config), strict=not config.tied)
    return model


def count_equal(tokens: Tensor, expected: Tensor) -> int:
    """Return the smallest number of equal first tokens over all pairs of texts int64 [prompts, tokens]."""
    return int((tokens == expected).int().cumprod(1).sum(1).min())


def choose_model(options: argparse.Namespace) -> Qwen3Model:
    """Build and load the model of the command line."""
    overrides = [f"model.max_tokens={options.tokens}", "model.sampling.temperature=0"]
    if options.model is None:
        shape = [f"model.transformer.{name}={size}" for name, size in SMALL_SHAPE.items()]
        overrides += [
            "model=qwen3_4b",
            "model.weights=random",
            f"model.prompt_tokens={PROMPT_TOKENS}",
            *shape,
        ]
    else:
        overrides.append(f"model={options.model}")
    more = [override for override in options.overrides if not override.startswith("method.")]
    model = built(composed([*overrides, *more])["model"])
    assert isinstance(model, Qwen3Model)
    model.load("cpu")
    return model


def choose_cache(model: Qwen3Model, name: str, options: argparse.Namespace) -> KVCache:
    """Open a cache with a method, at the budget and with the method's overrides of the command line."""
    more = [override for override in options.overrides if override.startswith("method.")]
    return prepare_cache(model, name, options.budget, more)


def draw_prompts(model: Qwen3Model, count: int) -> Tensor:
    """Draw prompts of random tokens, int64 [count, tokens], of the model's prompt length."""
    rng = torch.Generator().manual_seed(0)
    return torch.randint(2, model.transformer.vocabulary, (count, model.prompt_tokens), generator=rng)


def write_texts(model: Qwen3Model, prompts: Tensor, cache: KVCache) -> Tensor:
    """Return the tokens int64 [prompts, tokens] that the engine generates, without an end token."""
    with torch.inference_mode():
        embedded = model._transformer.embed(prompts)
    noise = PromptNoise(0, range(len(prompts)))
    drawn = draw_text_tokens(
        model._transformer, embedded, model.spec.segments, cache, noise, model.sampling, ends=(), pad=0
    )
    return drawn.tokens


OPTIONS = {
    "model": None, "batch": 8, "tokens": 2000, "threads": 2, "repeats": 3, "methods": "hard_kv", "budget": "0.25",
    "slope": False, "cpu_time": False, **OVERRIDES,
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    model, clock = choose_model(options), choose_clock(options.cpu_time)
    theirs, prompts = open_in_transformers(model._transformer), draw_prompts(model, options.batch)

    def in_transformers() -> Tensor:
        settings = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": model.max_tokens}
        tokens: Tensor = theirs.generate(prompts, do_sample=False, **settings)
        return tokens[:, prompts.shape[1] :]

    caches = {"full": prepare_cache(model, "full", "1")}
    for name in filter(None, options.methods.split(",")):
        caches[f"{name} {options.budget}"] = choose_cache(model, name, options)
    runs: dict[str, Callable[[], Tensor]] = {"transformers": in_transformers}
    runs |= {name: partial(write_texts, model, prompts, cache) for name, cache in caches.items()}
    timed = take_turns(runs, options.repeats, clock)
    print(
        f"{model.name}: {model.max_tokens} tokens after {model.prompt_tokens}, batch {options.batch}, "
        f"{options.threads} threads, median of {options.repeats}"
    )
    columns = {"s": ".3f", "tokens/s": ".0f", "transformers over it": ".2f"}
    table = Table(columns | {"first tokens equal": "d", "peak held": ".3f"}, width=16)
    base = timed["transformers"]
    for name, (seconds, texts) in timed.items():
        cells = (seconds, options.batch * model.max_tokens / seconds, base.seconds / seconds)
        if name in caches:
            peak, full = caches[name].ledger.peak_tokens, model.spec.all_heads * model.spec.segments[-1].start
            cells = (*cells, count_equal(texts, base.result), peak / full)
        table.add(name, *cells)
    for name, cache in caches.items() if options.slope else ():
        print_slope(name, measure_slope(cache, model, runs[name], options.repeats, clock))
