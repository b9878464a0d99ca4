"""Tensors of language models in GGUF files, under the names of the Hugging Face Hub.

Names and layouts follow llama.cpp's `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from kvbench.models.files.gguf import Gguf, PackedTensor, Value


class Architecture(NamedTuple):
    """A kind of decoder.

    Attributes:
        neighbours: whether a rotation pairs adjacent channels of queries and keys (`permute` of llama.cpp's
            converter); otherwise they are D/2 apart, as in the Hub's files.
        names: the Hub's names of a layer's tensors where they differ from `LAYER_NAMES`.
    """

    neighbours: bool = False
    names: Mapping[str, str] = {}


ARCHITECTURES = {
    "llama": Architecture(neighbours=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "phi3": Architecture(names={"ffn_up": "mlp.gate_up_proj"}),
}
"""By `general.architecture`, which is config.json's `model_type` too; files of Mistral say `llama`."""
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""The Hub's names of a layer's tensors, by llama.cpp's."""
FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, float32 [D/2], in which llama.cpp stores Llama 3's scaling."""
FOLLOWED = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
})  # fmt: skip
"""Keys of an architecture that decide a configuration, without its name."""
UNUSED = frozenset({
    "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
})  # fmt: skip
"""Keys that change no number of these architectures in llama.cpp (the last one: of unscaled or linear rotations)."""
NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,), "rope.scaling.attn_factor": (1,),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
}  # fmt: skip
"""Values of other keys that change nothing; of keys not named here 0 and false, as in llama.cpp."""


def list_tensors(file: Gguf) -> dict[str, PackedTensor]:
    """Return a file's tensors under the Hub's names; unpacked, they equal the tensors of the Hub's file.

    Raises:
        ValueError: the file is of another architecture, or a tensor is not of a decoder.
    """
    name, architecture = find_architecture(file)
    head_dim = count_channels(file.metadata, name)
    tensors = {}
    for ours, tensor in file.tensors.items():
        if ours == FACTORS:
            continue  # the scaling is in the configuration
        rotated = architecture.neighbours and re.search(r"\.attn_[qk]\.", ours) is not None
        if rotated and (head_dim % 2 or not tensor.shape or tensor.shape[0] % head_dim):
            raise ValueError(f"{ours} is {list(tensor.shape)}, not heads of {head_dim} channels")
        tensors[_rename(ours, architecture)] = replace(tensor, paired=head_dim) if rotated else tensor
    return tensors


def find_architecture(file: Gguf) -> tuple[str, Architecture]:
    """Return the name and the layout of a file's architecture.

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
        known = own == key or own in FOLLOWED or own in UNUSED
        if not known and value not in NEUTRAL.get(own, (0,)):
            raise ValueError(f"{key} is {value!r:.60}, which is not followed; use the model's safetensors")
    if isinstance(parts := file.metadata.get("split.count"), int) and parts > 1:
        raise ValueError(f"it is one of {parts} parts; join them with llama-gguf-split --merge")
    return name, ARCHITECTURES[name]


def _rename(ours: str, architecture: Architecture) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", ours)
    layer, part, kind = match.groups() if match else (None, "", "")
    names = NAMES if layer is None else {**LAYER_NAMES, **architecture.names}
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
        raise ValueError(f"{names[0]} is {key} and {names[1]} is {value}; equal ones are read")
    return key


def find_count(values: Mapping[str, Value], key: str, default: int | None = None) -> int:
    """Return a positive whole number; without a default, a ValueError if the key is missing."""
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        wrong = "missing" if found is None else f"{found!r:.60}, must be one positive number"
        raise ValueError(f"{key} is {wrong}")
    return found
