"""Llama-style decoders as transformers has them: tiny models of random weights, one of each kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.models.files.weights import Source
from kvbench.models.llama.model import LlamaModel
from kvbench.models.parts.text_sampling import TextSampling
from tests.support.reference_qwen3 import END, PAD, VOCABULARY, make_official, write_tokenizer

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-4,
    "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
"""Of four pairs of channels one keeps its frequency, one is interpolated and two are divided."""
ROPE = {"rope_type": "default", "rope_theta": 50.0}
TWINS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "rope_parameters": ROPE}),
    "phi3": ("Phi3", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "phi4": ("Phi3", {"num_attention_heads": 4, "tie_word_embeddings": True}),
}
"""Class of transformers and settings of each model."""


def official(name: str) -> Any:
    """transformers' model of a name."""
    family, settings = TWINS[name]
    return make_official(family, SIZES | settings)


def write_twin(name: str, folder: Path) -> Any:
    """Write a model's folder in shards, as the Hub has it, with its tokenizer, and return the model."""
    model = official(name)
    model.save_pretrained(folder, max_shard_size="40KB")
    write_tokenizer(folder)
    return model


def reading(path: Path | str | None, repo: str | None = None, **settings: Any) -> LlamaModel:
    """A model of a folder's files that takes the likeliest token, not loaded."""
    source = Source("model.sources.weights", None if path is None else str(path), repo)
    sizes = {"prompt_tokens": 7, "max_tokens": 30, "chunk": 8, **settings}
    return LlamaModel(name="twin", sampling=TextSampling(0), sources={"weights": source}, **sizes)
