"""Lumina-mGPT: settings and shapes without weights, then prompts to images."""

from dataclasses import dataclass
from functools import partial

import torch

from kvbench.models.files.checkpoints import Clean
from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.sampling import LuminaSampling
from kvbench.models.lumina.tokenizer import Chameleon, ChameleonConfig
from kvbench.models.lumina.transformer import Lumina, LuminaConfig
from kvbench.models.next_token import LinedImageModel
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.image_prompts import hash_lines, read_lumina
from kvbench.models.parts.tokens import FramedTokens, read_tokenizer


@dataclass
class LuminaModel(LinedImageModel[Lumina, Chameleon]):
    """Lumina-mGPT at any image size; the image tokenizer is Chameleon's.

    Sources are `weights` (language model), `tokenizer` (image tokenizer) and `text` (`tokenizer.json`). The
    unconditional branch has only the three tokens that begin an image. A row of the image (`chunk`) includes its
    newline. In bfloat16 the rounding of cosines and sines depends on the padding.

    Differs from the official code in: every image has the configured size, so that its first tokens are part of the
    prompt and not sampled; no token follows the image; in bfloat16, keys are rounded when they are cached, not at every
    use, which gives the same values in two thirds of the bytes, and cosines and sines are rounded at positions that
    include the padding; a batch can have several prompts.
    """

    transformer: LuminaConfig
    tokenizer: ChameleonConfig
    sampling: LuminaSampling

    networks = (Lumina, Chameleon)
    decoding = Decoding("tf32")

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"weights": partial(clean_lumina, config=self.transformer), "tokenizer": clean_chameleon}

    def _read_text(self, device: torch.device | str) -> tuple[FramedTokens, str]:
        if self.weights == "random":
            return hash_lines(self.transformer), ""
        make = partial(read_lumina, config=self.transformer)
        return read_tokenizer(self.sources["text"], make, "Lumina-mGPT")
