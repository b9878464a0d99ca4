"""Janus-Pro: settings and shapes without weights, then prompts to images."""

from dataclasses import dataclass
from functools import partial

import torch

from kvbench.models.files.checkpoints import Clean
from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.transformer import Janus, JanusConfig
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.next_token import PromptedImageModel
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.image_prompts import hash_chat, read_janus
from kvbench.models.parts.tokens import FramedTokens, read_tokenizer


@dataclass
class JanusModel(PromptedImageModel[Janus, VQ]):
    """Janus-Pro at any size; the image tokenizer is LlamaGen's.

    Sources are `weights` (language model and image tokenizer) and `text` (`tokenizer.json`).

    Differs from the official code in: rotation is in float32, and a batch can have several prompts.
    """

    transformer: JanusConfig

    networks = (Janus, VQ)
    decoding = Decoding("bfloat16", half="cast")
    config_section = "language_config"

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"weights": partial(clean_janus, head_dim=self.transformer.head_dim)}

    def _read_text(self, device: torch.device | str) -> tuple[FramedTokens, str]:
        if self.weights == "random":
            return hash_chat(self.transformer.vocabulary), ""
        return read_tokenizer(self.sources["text"], read_janus, "Janus-Pro")
