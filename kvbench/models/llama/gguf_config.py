"""Configurations of language models in GGUF files, under the keys of transformers' config.json."""

import math
from collections.abc import Mapping

import numpy as np

from kvbench.models.files.gguf import Gguf, Value
from kvbench.models.files.gguf_decoder import FACTORS, count_channels, find_architecture, find_count
from kvbench.models.parts.rotary import RopeScaling, compute_frequencies

LOW, HIGH, CONTEXT = 1.0, 4.0, 8192
"""Settings of `RopeScaling` in every published model with Llama 3's scaling; `factor` varies."""


def make_config(file: Gguf) -> dict[str, object]:
    """Return a file's configuration under the keys of transformers' config.json.

    Raises:
        ValueError: the architecture is not supported, or a key is missing or has the wrong type.
    """
    name, values = find_architecture(file), file.metadata
    heads = find_count(values, f"{name}.attention.head_count")
    head_dim = count_channels(values, name)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("it has no tensor token_embd.weight [tokens, channels]; download it again")
    config: dict[str, object] = {
        "model_type": name,
        "hidden_size": find_count(values, f"{name}.embedding_length"),
        "intermediate_size": find_count(values, f"{name}.feed_forward_length"),
        "num_hidden_layers": find_count(values, f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": find_count(values, f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": find_count(values, f"{name}.context_length"),
        "rms_norm_eps": _find_real(values, f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _find_real(values, f"{name}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    if "blk.0.attn_q.bias" in file.tensors and name != "qwen2":  # qwen2 has biases without a key
        config["attention_bias"] = True
    rotated = find_count(values, f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if window := values.get(f"{name}.attention.sliding_window"):
        config["sliding_window"] = window
    if (scaling := _read_scaling(file, name)) is not None:
        config["rope_scaling"] = scaling
    return config


def _find_real(values: Mapping[str, Value], key: str, default: float | None = None) -> float:
    """Return a float32 as the shortest decimal number that rounds to it, as config.json has it."""
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(
            f"{key} is {'missing' if found is None else f'{found!r:.60}, must be a positive number'}"
        )
    return float(str(np.float32(found)))


def _read_scaling(file: Gguf, name: str) -> dict[str, object] | None:
    """Return the scaling of rotary frequencies as `rope_scaling` of config.json; None if there is none.

    As in llama.cpp, a factor without a type scales linearly, `rope.scale_linear` is its older name, and 0 means 1.
    """
    values, prefix = file.metadata, f"{name}.rope"
    kind = values.get(f"{prefix}.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"{prefix}.scaling.type is {kind!r:.60}, not linear; use the model's safetensors")
    key = f"{prefix}.scaling.factor"
    if key not in values:
        key = f"{prefix}.scale_linear"
    scaled = kind == "linear" and values.get(key, 0) not in (0, 1)
    if FACTORS not in file.tensors:
        return {"rope_type": kind, "factor": _find_real(values, key)} if scaled else None
    if scaled:
        raise ValueError(f"{key} is {values[key]!r:.60} beside {FACTORS}; a file must have only one of them")
    found = file.tensors[FACTORS].unpack().double().flatten().tolist()
    factor, base = max(1.0, *found), _find_real(values, f"{prefix}.freq_base", 10000.0)
    frequencies = compute_frequencies(2 * len(found), base)
    divided = RopeScaling(factor, LOW, HIGH, CONTEXT).scale(frequencies)
    if not np.allclose(found, frequencies / divided, rtol=1e-4, atol=0):
        raise ValueError(f"{FACTORS} are not divisors of Llama 3's scaling; use the model's safetensors")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": CONTEXT,
    }
