"""Conversion of Janus-Pro's files to the modules' names."""

from collections.abc import Mapping

from kvbench.models.files.checkpoints import State
from kvbench.models.files.official_files import clean_vqgan, name_parts, take_part
from kvbench.models.parts.decoder_files import clean_llama

LANGUAGE = "language_model.model."
VISION = "gen_vision_model."
DRAWING = ("gen_embed.", "gen_aligner.", "gen_head.")


def clean_janus(raw: Mapping[str, object], head_dim: int) -> State:
    """Return the states of language model and image tokenizer, under `transformer` and `tokenizer`.

    Networks for understanding images or generating text are dropped.
    """
    drawing = {name: tensor for name, tensor in take_part(raw, "").items() if name.startswith(DRAWING)}
    language = clean_llama(take_part(raw, LANGUAGE), head_dim) | drawing
    return name_parts(language, clean_vqgan(take_part(raw, VISION)))
