"""Conversion of Emu3's files in the layout of transformers to the modules' names."""

import re
from collections.abc import Mapping

from torch import Tensor

from kvbench.models.files.checkpoints import State
from kvbench.models.files.official_files import DRAWING, clean_vqgan, name_parts, take_part
from kvbench.models.parts.decoder_files import HEAD, clean_llama

OLDER = (
    (r"^text_model\.lm_head\.", "lm_head."),
    (r"^text_model\.model\.", "model.text_model."),
    (r"^vqmodel\.", "model.vqmodel."),
)
"""Patterns of names in files of older versions of transformers, and today's names."""
LANGUAGE, IMAGES = "model.text_model.", "model.vqmodel."
NAMES = (
    (r"^decoder\.(time_\w+)\.", r"\1."),
    (r"^(time_conv\.\d+)\.conv\.", r"\1."),
    (r"^post_quant_conv\.conv\.", "post_quant_conv."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.up_block\.up\.", ".up."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.out_proj\.", ".proj_out."),
    (r"\.norm_layer\.", ".norm."),
    (r"\.conv_y\.", ".scale."),
    (r"\.conv_b\.", ".shift."),
)
"""Patterns of names in the image tokenizer's files, and the names that `clean_vqgan` reads."""
EPSILON = 1e-5
"""Epsilon of the batch norms."""


def clean_emu3(raw: Mapping[str, object], head_dim: int) -> State:
    """Return the states of language model and image tokenizer, under `transformer` and `tokenizer`.

    The encoder of images is dropped.
    """
    state = {_rename(name, OLDER): tensor for name, tensor in take_part(raw, "").items()}
    language = take_part(state, LANGUAGE) | ({"output.weight": state[HEAD]} if HEAD in state else {})
    return name_parts(clean_llama(language, head_dim), clean_images(take_part(state, IMAGES)))


def clean_images(raw: Mapping[str, Tensor]) -> State:
    """Return the state of the tokenizer's decoder for single images.

    Convolutions over time are causal, so that a single frame meets only the last plane of their kernels. Linear layers
    of attention become 1x1 convolutions. Batch norms become a product and a sum for each channel.
    """
    state = {_rename(name, NAMES): tensor for name, tensor in raw.items() if name.startswith(DRAWING)}
    for name in [name for name in state if name.endswith(".running_var")]:
        _fold(state, name.removesuffix(".running_var"))
    kept = {name: _flatten(name, tensor) for name, tensor in state.items() if not name.endswith("_tracked")}
    return clean_vqgan(kept)


def _rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _flatten(name: str, tensor: Tensor) -> Tensor:
    if tensor.ndim == 5:
        return tensor[:, :, -1]
    attention = re.search(r"\.(?:[qkv]|proj_out)\.weight$", name)
    return tensor[:, :, None, None] if attention and tensor.ndim == 2 else tensor


def _fold(state: State, norm: str) -> None:
    """Replace a batch norm by a product and a sum for each channel, in place; an incomplete one stays."""
    parts = [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
    if all(part in state for part in parts):
        weight, bias, mean, variance = (state.pop(part).double() for part in parts)
        factor = weight / (variance + EPSILON).sqrt()
        state[f"{norm}.weight"] = factor.float()[:, None, None, None]
        state[f"{norm}.bias"] = (bias - mean * factor).float()
