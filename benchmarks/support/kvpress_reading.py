"""A text read by transformers under a press, and on the engine under a method: what is kept, and forced logits."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.methods.shared.base import Method
from kvbench.models.parts.decoder_files import split_decoder
from kvbench.models.text_model import TextModel

Kept = list[list[set[int]]]
"""Positions that each head of each layer keeps of the prompt, without its padding."""

Prepare = Callable[[ModelSpec], Method]
"""Returns a method that is prepared for the shapes of a prompt with its padding."""


@dataclass(frozen=True)
class PressResult:
    """A text whose prompt was compressed once and whose later tokens were forced.

    Attributes:
        kept: see `Kept`.
        logits: float32 [forced tokens, vocabulary], after each forced token.
        seconds: processor time of a forced token, the median.
        scores: scores of the press, float32 [heads, tokens] by layer; empty on the engine.
    """

    kept: Kept
    logits: Tensor
    seconds: float
    scores: list[Tensor]


def build_llama(model: TextModel, attention: str) -> Any:
    """Return transformers' LLaMA with the weights of a loaded model.

    Args:
        model: a decoder without normalised queries and keys.
        attention: transformers' implementation, `sdpa` or `eager`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        attn_implementation=attention,
    )
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    state = split_decoder(model._transformer.state_dict(), shape)
    llama.load_state_dict(state, strict=False, assign=True)
    llama.tie_weights()
    llama.model.rotary_emb = type(llama.model.rotary_emb)(config)
    return llama.eval()


@torch.inference_mode()
def read_with_press(
    llama: Any, press: Any, tokens: Sequence[int], given: int, seed_of: Callable[[int], int] = lambda _: 0
) -> PressResult:
    """Read `given` tokens under a press, None for the full cache, and force the others.

    Args:
        llama: a model from `build_llama`.
        press: a press of kvpress, or None.
        tokens: tokens of the text.
        given: tokens of the prompt.
        seed_of: seed of torch's generator before the press compresses a layer.
    """
    from transformers import DynamicCache

    cache, whole, scores = DynamicCache(), list[Tensor](), list[Tensor]()

    def before(module: nn.Module, *_: object) -> None:
        if len(whole) < len(llama.model.layers):
            whole.append(cache.layers[module.layer_idx].keys)
            torch.manual_seed(seed_of(module.layer_idx))

    hooks = [layer.self_attn.register_forward_hook(before, with_kwargs=True) for layer in llama.model.layers]
    if press is not None:
        _listen(press, scores)
    ids = torch.tensor([list(tokens)])
    try:
        with nullcontext() if press is None else press(llama):
            llama(ids[:, :given], past_key_values=cache)
            kept = [
                _find_kept(layer.self_attn, one[0], cache.layers[at].keys[0])
                for at, (layer, one) in enumerate(zip(llama.model.layers, whole, strict=True))
            ]

            def step(at: int) -> Tensor:
                position = torch.tensor([[at]])
                return llama(ids[:, at : at + 1], past_key_values=cache, position_ids=position).logits[0, -1]

            logits, seconds = _force(step, range(given, len(tokens)))
    finally:
        for hook in hooks:
            hook.remove()
        for layer in llama.model.layers:
            layer.self_attn.masked_key_indices = None
    return PressResult(kept, logits, seconds, scores)


def _listen(press: Any, scores: list[Tensor]) -> None:
    """Append the scores of a press, or of the press in it, before it changes them."""
    scorer = press if hasattr(press, "score") else press.press
    inner = scorer.score

    def score(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = inner(*args, **kwargs)
        scores.append(found[0].clone())
        return found

    scorer.score = score


def _find_kept(module: Any, whole: Tensor, keys: Tensor) -> list[set[int]]:
    """Return the positions of a layer's kept keys [heads, n, D] among all [heads, tokens, D]."""
    masked = getattr(module, "masked_key_indices", None)
    if masked is not None:  # heads of unequal length: evicted keys stay, and are hidden from attention
        _, heads, positions = masked
        left = [set(range(whole.shape[1])) for _ in whole]
        for head, position in zip(heads.tolist(), positions.tolist(), strict=True):
            left[head].discard(position)
        return left
    equal = (whole[:, :, None] == keys[:, None]).all(-1)
    return [set(rows.any(1).nonzero()[:, 0].tolist()) for rows in equal]


@torch.inference_mode()
def read_on_engine(
    model: TextModel, prepare: Prepare, tokens: Sequence[int], given: int, padding: int
) -> PressResult:
    """Read `given` tokens after some padding under a method, and force the others.

    Args:
        model: loaded.
        prepare: see `Prepare`.
        tokens: tokens of the text.
        given: tokens of the prompt.
        padding: tokens in front of it.
    """
    spec, transformer = replace(model.spec.with_prompt(given + padding), origin=0), model._transformer
    rotation = transformer.rotations(spec.segments[-1].end + 1)
    cache = KVCache(
        spec, prepare(spec), dtype=torch.float32, rotation=rotation, projection=model.output_projection
    )
    cache.reset(1, [padding] if padding else None)
    ids = torch.tensor([[model._text.pad] * padding + list(tokens)])
    prompt, later = spec.segments[:2]
    cache.begin(prompt)
    transformer(transformer.embed(ids[:, : prompt.end]), rotation[: prompt.end], cache.attend)
    cache.begin(later)
    kept = [
        [set((row[row >= 0] - padding).tolist()) for row in layout.positions] for layout in cache.held.layouts
    ]

    def step(at: int) -> Tensor:
        x = transformer(transformer.embed(ids[:, at : at + 1]), rotation[at : at + 1], cache.attend)
        return transformer.logits(x[:, -1])[0]

    logits, seconds = _force(step, range(prompt.end, ids.shape[1]))
    return PressResult(kept, logits, seconds, [])


def _force(step: Callable[[int], Tensor], positions: Sequence[int]) -> tuple[Tensor, float]:
    logits, seconds = [], []
    for at in positions:
        started = time.process_time()
        logits.append(step(at))
        seconds.append(time.process_time() - started)
    return torch.stack(logits), median(seconds)


@torch.inference_mode()
def time_generate(llama: Any, tokens: Sequence[int], count: int) -> float:
    """Return the processor seconds of a token of transformers' `generate` with its full cache, without the prompt."""
    from transformers import GenerationConfig

    ids = torch.tensor([list(tokens)])

    def config(length: int) -> Any:
        return GenerationConfig(max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0)

    def generate(length: int) -> float:
        started = time.process_time()
        llama.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config(length))
        return time.process_time() - started

    generate(1)
    first = median(generate(1) for _ in range(3))
    return (median(generate(count + 1) for _ in range(3)) - first) / count
