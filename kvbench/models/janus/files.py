"""Conversion of Janus-Pro's files to the modules' names."""

from collections.abc import Mapping

from torch import Tensor

from kvbench.models.files.checkpoints import State
from kvbench.models.files.llama_files import clean_llama
from kvbench.models.files.official_files import clean_vqgan

LANGUAGE = "language_model.model."
VISION = "gen_vision_model."
DRAWING = ("gen_embed.", "gen_aligner.", "gen_head.")


def clean_janus(raw: Mapping[str, object], head_dim: int) -> State:
    """Return the states of language model and image tokenizer, under `transformer` and `tokenizer`.

    Networks that only understand images or write text are dropped.
    """
    tensors = {name: tensor for name, tensor in raw.items() if isinstance(tensor, Tensor)}
    vision = {k.removeprefix(VISION): v for k, v in tensors.items() if k.startswith(VISION)}
    language = {k.removeprefix(LANGUAGE): v for k, v in tensors.items() if k.startswith(LANGUAGE)}
    state = {f"tokenizer.{name}": tensor for name, tensor in clean_vqgan(vision).items()}
    state |= {f"transformer.{name}": tensor for name, tensor in clean_llama(language, head_dim).items()}
    return state | {f"transformer.{k}": v for k, v in tensors.items() if k.startswith(DRAWING)}
