"""Tensors of language models in GGUF files, under the names of the Hugging Face Hub.

Names and layouts follow llama.cpp's `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from kvbench.models.files.gguf import Gguf, PackedTensor, Value

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")
"""Values of `general.architecture`, which is config.json's `model_type` too; files of Mistral say `llama`.

Rotations of `llama` pair adjacent channels of queries and keys (`permute` of llama.cpp's converter), those of the
others channels that are D/2 apart, as in the Hub's files.
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
    "rope.scaling.type", "rope.scaling.factor",  # the rest changes no number of these architectures and scalings
    "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
})  # fmt: skip
"""Keys of an architecture that are followed as in llama.cpp, without its name."""
NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,), "rope.scaling.attn_factor": (1,),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
}  # fmt: skip
"""Values of other keys that change nothing; of keys not named here 0 and false, as in llama.cpp."""


def list_tensors(file: Gguf) -> dict[str, PackedTensor]:
    """Return a file's tensors under the Hub's names; unpacked, they equal the tensors of the Hub's safetensors.

    Raises:
        ValueError: the file is of another architecture, or a tensor is not of a decoder.
    """
    name = find_architecture(file)
    head_dim = count_channels(file.metadata, name)
    tensors = {}
    for ours, tensor in file.tensors.items():
        if ours == FACTORS:
            continue  # the scaling is in the configuration
        rotated = name == "llama" and re.search(r"\.attn_[qk]\.", ours) is not None
        if rotated and (head_dim % 2 or not tensor.shape or tensor.shape[0] % head_dim):
            raise ValueError(f"{ours} is {list(tensor.shape)}, not heads of {head_dim} channels")
        tensors[_rename(ours, name)] = replace(tensor, paired=head_dim) if rotated else tensor
    return tensors


def find_architecture(file: Gguf) -> str:
    """Return the name of a file's architecture.

    Raises:
        ValueError: it is none that is read, a part of a split file, or a key changes numbers in another way.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {name!r:.60}, but only {', '.join(ARCHITECTURES)} are read"
        )
    for key, value in file.metadata.items():
        own = key.removeprefix(f"{name}.")
        if own != key and own not in KNOWN and value not in NEUTRAL.get(own, (0,)):
            raise ValueError(f"{key} is {value!r:.60}, which is not supported; use the model's safetensors")
    if isinstance(parts := file.metadata.get("split.count"), int) and parts > 1:
        raise ValueError(f"it is one of {parts} parts; join them with llama-gguf-split --merge")
    return name


def _rename(ours: str, architecture: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", ours)
    layer, part, kind = match.groups() if match else (None, "", "")
    names = NAMES if layer is None else LAYER_NAMES | OTHER_NAMES.get(architecture, {})
    if part not in names:
        raise ValueError(f"{ours:.80} is not a tensor of a decoder that is read")
    return f"{names[part]}.{kind}" if layer is None else f"model.layers.{layer}.{names[part]}.{kind}"


def count_channels(values: Mapping[str, Value], name: str) -> int:
    """Return the channels of a head of an architecture.

    Raises:
        ValueError: a key is missing or of another type, or keys and values differ in it.
    """
    shared = find_count(values, f"{name}.embedding_length") // find_count(
        values, f"{name}.attention.head_count"
    )
    names = [f"{name}.attention.{one}_length" for one in ("key", "value")]
    key, value = (find_count(values, one, shared) for one in names)
    if key != value:
        raise ValueError(f"{names[0]} is {key} and {names[1]} is {value}; only equal ones are supported")
    return key


def find_count(values: Mapping[str, Value], key: str, default: int | None = None) -> int:
    """Return a positive whole number; without a default, a ValueError if the key is missing."""
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        wrong = "missing" if found is None else f"{found!r:.60}, must be one positive number"
        raise ValueError(f"{key} is {wrong}")
    return found
