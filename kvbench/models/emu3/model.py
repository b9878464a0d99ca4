"""Emu3-Gen: settings and shapes without weights, then prompts to images."""

from dataclasses import dataclass
from functools import partial

import torch

from kvbench.models.emu3.files import clean_emu3
from kvbench.models.emu3.tokenizer import Emu3VQ, Emu3VQConfig
from kvbench.models.emu3.transformer import Emu3Config
from kvbench.models.files.checkpoints import Clean
from kvbench.models.next_token import LinedImageModel
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.image_prompts import hash_lines, read_emu3
from kvbench.models.parts.tokens import FramedTokens, read_tokenizer


@dataclass
class Emu3Model(LinedImageModel[Decoder, Emu3VQ]):
    """Emu3-Gen at any image size.

    Sources are `weights` (language model and image tokenizer, in the layout of transformers) and `text`
    (`tokenizer.json`). A row of the image (`chunk`) includes its newline.

    Differs from the official code in: guidance is applied to logits, not to log-probabilities, which gives the same
    probabilities; no token is sampled after the image; rotation is in float32; a batch can have several prompts.

    Attributes:
        suffix: text appended to every prompt.
        negative: prompt of the unconditional branch.
    """

    transformer: Emu3Config
    tokenizer: Emu3VQConfig
    suffix: str = ""
    negative: str = ""

    networks = (Decoder, Emu3VQ)
    decoding = Decoding("tf32")
    config_section = "text_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("suffix", "negative"):
            if not isinstance(value := getattr(self, key), str):
                raise ValueError(f"model.{key}={value}: must be a string")

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"weights": partial(clean_emu3, head_dim=self.transformer.head_dim)}

    def _read_text(self, device: torch.device | str) -> tuple[FramedTokens, str]:
        if self.weights == "random":
            text, digest = hash_lines(self.transformer, self.suffix, self.negative), ""
        else:
            read = partial(read_emu3, config=self.transformer, suffix=self.suffix, negative=self.negative)
            text, digest = read_tokenizer(self.sources["text"], read, "Emu3")
        needed = len(text.drop_condition([]))
        if self.sampling.branches > 1 and needed > self.prompt_tokens:
            raise ValueError(
                f"model.negative={self.negative!r}: needs {needed} tokens, more than "
                f"model.prompt_tokens={self.prompt_tokens}; set it to {needed}, or shorten the text"
            )
        return text, digest
