"""Conversion of official checkpoints of image models to the modules' names."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.files.checkpoints import State

DRAWING = ("decoder.", "post_quant_conv.", "quantize.")
"""Prefixes of the names of a VQGAN's tensors that decode tokens."""


def take_part(raw: Mapping[str, object], prefix: str) -> State:
    """Return the tensors whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in _find_tensors(raw).items() if k.startswith(prefix)}


def name_parts(transformer: State, tokenizer: State) -> State:
    """Return the state of a model whose file has both networks."""
    parts = {"transformer": transformer, "tokenizer": tokenizer}
    return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}


def _find_tensors(raw: Mapping[str, object], *wrappers: str) -> State:
    """Return the tensors by name, inside the first wrapper that exists."""
    inner = next((raw[key] for key in wrappers if key in raw), raw)
    assert isinstance(inner, Mapping)
    return {name: tensor for name, tensor in inner.items() if isinstance(tensor, Tensor)}


def clean_transformer(raw: Mapping[str, object]) -> State:
    """Return a transformer's state without constant buffers; the published file is flat or nested by a trainer."""
    nested = raw.get("trainer")
    if isinstance(nested, Mapping):
        raw = nested.get("gpt_fsdp", nested)  # type: ignore[assignment]
    dropped = ("lvl_1L", "attn_bias_for_masking", "Infinity_visible_kvlen", "Infinity_invisible_qlen")
    state = {k: v for k, v in _find_tensors(raw).items() if not k.endswith(("zero_k_bias", *dropped))}
    return {k: v.reshape(1, -1, 1, 1) if k.endswith("scale_mul_1H11") else v for k, v in state.items()}


def clean_tokenizer(raw: Mapping[str, object]) -> State:
    """Return the tokenizer's state, which official files have under `vae`, convolutions and norms wrapped or not.

    Other tensors of official files are dropped; the embedded model has learned amplitudes.
    """
    prefixes = ("encoder.", "decoder.", "amplitudes")
    return {_wrapped(k): v for k, v in _find_tensors(raw, "vae").items() if k.startswith(prefixes)}


def clean_vqvae(raw: Mapping[str, object]) -> State:
    """Return the state of VAR's tokenizer without its statistics of code use, convolutions and norms wrapped or not."""
    return {_wrapped(k): v for k, v in _find_tensors(raw).items() if not k.endswith("ema_vocab_hit_SV")}


def clean_decoder(raw: Mapping[str, object]) -> State:
    """Return the state of a next-token transformer, flat or nested by a trainer, without tables and caches."""
    state = _find_tensors(raw, "model", "module", "state_dict")
    return {k: v for k, v in state.items() if not re.search("freqs_cis|causal_mask|kv_cache", k)}


def clean_vqgan(raw: Mapping[str, object]) -> State:
    """Return the state of a VQGAN (LlamaGen's, Chameleon's) under the names of `kvbench.models.parts.autoencoder`.

    Files have separate projections of an attention, and LlamaGen's number the decoder's levels from the lowest
    resolution. Statistics of code use are dropped.
    """
    tensors = _find_tensors(raw, "model", "state_dict")
    state = {k: v for k, v in tensors.items() if not k.endswith("codebook_used")}
    for name in [name for name in state if re.search(r"\.q\.(weight|bias)$", name)]:
        parts = [name.replace(".q.", f".{part}.") for part in "qkv"]
        if all(part in state for part in parts):
            state[name.replace(".q.", ".qkv.")] = torch.cat([state.pop(part) for part in parts])
    levels = [re.match(r"decoder\.conv_blocks\.(\d+)\.", name) for name in state]
    last = max((int(level[1]) for level in levels if level), default=0)

    def rename(name: str) -> str:
        name = re.sub(
            r"^decoder\.conv_blocks\.(\d+)", lambda level: f"decoder.up.{last - int(level[1])}", name
        )
        name = re.sub(r"^encoder\.conv_blocks\.", "encoder.down.", name).replace(".res.", ".block.")
        middle = ("block_1", "attn_1", "block_2")
        return re.sub(r"\.mid\.([012])\.", lambda match: f".mid.{middle[int(match[1])]}.", name)

    return {_wrapped(rename(name)): tensor for name, tensor in state.items()}


def _wrapped(name: str) -> str:
    parts = name.split(".")
    owner, layer = ("", "", *parts)[-3:-1]
    resampling = layer == "conv" and owner in ("downsample", "upsample")
    if resampling or layer == "nin_shortcut" or (layer.startswith("conv") and layer != "conv"):
        return ".".join([*parts[:-1], "conv", parts[-1]])
    if layer.startswith("norm") and layer != "norm":
        return ".".join([*parts[:-1], "norm", parts[-1]])
    return name
