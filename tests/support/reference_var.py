"""Support of the tests of VAR: official tensors, the tokenizers of the formula, and the tiny transformers."""

from functools import lru_cache, partial

import torch

from kvbench.models.var.tokenizer import VQVAE, VQConfig
from kvbench.models.var.transformer import VAR, VARConfig, is_rounded
from tests.support.published import read_meta, read_tensors
from tests.support.reference_llamagen import formula

meta = partial(read_meta, "var")
golden = partial(read_tensors, "var")
SIDES = (1, 2, 3, 4, 6)
TINY_VQ = VQConfig(codes=128, channels=8, widths=(32, 32, 64))
FULL_VQ = VQConfig(codes=4096, channels=32, widths=(160, 160, 320, 320, 640))


def official_name(name: str) -> str:
    """Our name of a tokenizer's tensor without the level that official files lack."""
    parts = name.split(".")
    wrapped = parts[-2] in ("conv", "norm") and parts[-3] != "attn_1"
    wrapped = wrapped and not (parts[-2] == "norm" and parts[-4] == "attn")
    return ".".join([*parts[:-2], parts[-1]]) if wrapped else name


@lru_cache
def tokenizer(config: VQConfig = TINY_VQ) -> VQVAE:
    """A tokenizer with the formula's weights."""
    with torch.device("meta"):
        model = VQVAE(config)
    state = {
        name: formula(official_name(name), tuple(tensor.shape)) for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def transformer(kind: str) -> VAR:
    """The tiny transformer `sep` or `shared`."""
    model = VAR(VARConfig(4, 64, 4, SIDES, classes=10, codes=128, channels=8, shared_aln=kind == "shared"))
    model.load_state_dict(golden(f"{kind}.weights"))
    return model.eval().requires_grad_(False)


def round_blocks(net: VAR, dtype: torch.dtype) -> None:
    """Cast the parameters that autocast would cast at every use."""
    for name, parameter in net.named_parameters():
        if is_rounded(name):
            parameter.data = parameter.data.to(dtype)
