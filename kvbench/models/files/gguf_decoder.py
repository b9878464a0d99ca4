"""Tensors of language models in GGUF files, under the names of the Hugging Face Hub.

Names and layouts follow llama.cpp's `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from kvbench.models.files.gguf import Gguf, PackedTensor, Value

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")
"""Values of `general.architecture`, which is config.json's `model_type` too; files of Mistral say `llama`.

Rotations pair adjacent channels of queries and keys in files of `llama` (`permute` of llama.cpp's converter), and
channels that are D/2 apart in all other files, as on the Hub.
"""
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""The Hub's names of a layer's tensors, by llama.cpp's."""
OTHER_NAMES = {"phi3": {"ffn_up": "mlp.gate_up_proj"}}
"""Names of tensors by architecture where they differ from `LAYER_NAMES`."""
FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, float32 [D/2], in which llama.cpp stores Llama 3's scaling."""
KNOWN = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor",  # the rest changes no value of these architectures and scalings
    "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
})  # fmt: skip
"""Supported keys of an architecture, without its prefix; they mean what they mean to llama.cpp."""
NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,), "rope.scaling.attn_factor": (1,),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
}  # fmt: skip
"""Neutral values of other keys; for keys that are not named here 0 and false, as in llama.cpp."""


def list_tensors(file: Gguf) -> dict[str, PackedTensor]:
    """Return a file's tensors under the Hub's names; unpacked, they equal the tensors of the Hub's safetensors.

    Raises:
        ValueError: the architecture is not supported, or a tensor is not a decoder's.
    """
    architecture = find_architecture(file)
    head_dim = count_channels(file.metadata, architecture)
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == FACTORS:
            continue  # the scaling is in the configuration
        rotated = architecture == "llama" and re.search(r"\.attn_[qk]\.", name) is not None
        if rotated and (head_dim % 2 or not tensor.shape or tensor.shape[0] % head_dim):
            raise ValueError(f"{name} is {list(tensor.shape)}, not heads of {head_dim} channels")
        tensors[_rename(name, architecture)] = replace(tensor, paired=head_dim) if rotated else tensor
    return tensors


def find_architecture(file: Gguf) -> str:
    """Return the name of a file's architecture.

    Raises:
        ValueError: the architecture or a key's value is not supported, or the file is one part of a split file.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {name!r:.60}, not {' or '.join(ARCHITECTURES)}; use the model's safetensors"
        )
    for key, value in file.metadata.items():
        suffix = key.removeprefix(f"{name}.")
        if suffix != key and suffix not in KNOWN and value not in NEUTRAL.get(suffix, (0,)):
            raise ValueError(f"{key} is {value!r:.60}, which is not supported; use the model's safetensors")
    if isinstance(parts := file.metadata.get("split.count"), int) and parts > 1:
        raise ValueError(f"it is one of {parts} parts; join them with llama-gguf-split --merge")
    return name


def _rename(name: str, architecture: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, part, kind = match.groups() if match else (None, "", "")
    names = NAMES if layer is None else LAYER_NAMES | OTHER_NAMES.get(architecture, {})
    if part not in names:
        raise ValueError(f"{name:.80} is not a known tensor; use the model's safetensors")
    return f"{names[part]}.{kind}" if layer is None else f"model.layers.{layer}.{names[part]}.{kind}"


def count_channels(values: Mapping[str, Value], name: str) -> int:
    """Return the channels of a head of an architecture.

    Raises:
        ValueError: a key is missing or of a wrong type, or heads of keys and of values have different channels.
    """
    shared = find_count(values, f"{name}.embedding_length") // find_count(
        values, f"{name}.attention.head_count"
    )
    names = [f"{name}.attention.{part}_length" for part in ("key", "value")]
    key, value = (find_count(values, part, shared) for part in names)
    if key != value:
        raise ValueError(f"{names[0]} is {key} and {names[1]} is {value}; only equal ones are supported")
    return key


def find_count(values: Mapping[str, Value], key: str, default: int | None = None) -> int:
    """Return the positive integer of a key; raise a ValueError if it is wrong, or missing without a default."""
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        wrong = "missing" if found is None else f"{found!r:.60}, must be one positive integer"
        raise ValueError(f"{key} is {wrong}")
    return found
