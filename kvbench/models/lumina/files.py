"""Conversion of Lumina-mGPT's and Chameleon's files to the modules' names."""

from collections.abc import Mapping

from kvbench.models.files.checkpoints import State
from kvbench.models.files.official_files import DRAWING, clean_vqgan
from kvbench.models.lumina.transformer import LuminaConfig
from kvbench.models.parts.decoder_files import clean_llama, strip_prefix


def clean_lumina(raw: Mapping[str, object], config: LuminaConfig) -> State:
    """Return the language model's state.

    Files have norms of queries and keys per GPU's share of the heads or per head; the result has them per head.
    """
    # Some copies contain an encoder of images.
    state = {k: v for k, v in strip_prefix(raw).items() if not k.startswith("vqmodel.")}
    for part, heads in (("q", config.heads), ("k", config.kv_heads)):
        for name in [name for name in state if f".{part}_norm." in name]:
            rows = state[name]  # another shape belongs to another model, which `check` refuses
            if rows.ndim == 2 and rows.shape[1] == config.head_dim and len(rows) and not heads % len(rows):
                state[name] = rows.repeat_interleave(heads // len(rows), 0).flatten()
    return clean_llama(state, config.head_dim)


def clean_chameleon(raw: Mapping[str, object]) -> State:
    """Return the state of Chameleon's image tokenizer without its encoder and tensors for training."""
    return {name: tensor for name, tensor in clean_vqgan(raw).items() if name.startswith(DRAWING)}
