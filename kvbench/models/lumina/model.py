"""Lumina-mGPT: settings and shapes without weights, then prompts to images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.models.files.checkpoints import Clean
from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.prompt import LuminaTokens, hash_tokens, read_tokens
from kvbench.models.lumina.sampling import LuminaSampling
from kvbench.models.lumina.tokenizer import Chameleon, ChameleonConfig
from kvbench.models.lumina.transformer import Lumina, LuminaConfig
from kvbench.models.next_token import PromptedImageModel
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.tokens import read_tokenizer


@dataclass
class LuminaModel(PromptedImageModel[Lumina, Chameleon]):
    """Lumina-mGPT at any image size; the image tokenizer is Chameleon's.

    Sources are `weights` (language model), `tokenizer` (image tokenizer) and `text` (`tokenizer.json`). The three
    tokens that begin an image are part of `prompt_tokens`; the unconditional branch has no others. A row of the image
    (`chunk`) includes its newline. In bfloat16 the rounding of cosines and sines depends on the padding.

    Differs from the official program in: every image has the configured size, so that its first tokens are part of the
    prompt and not drawn; no token is drawn after the image; in bfloat16, keys are rounded when they are cached, not at
    every use, which gives the same numbers in two thirds of the bytes, and cosines and sines are rounded at positions
    that include the padding; a batch can have several prompts.
    """

    transformer: LuminaConfig
    tokenizer: ChameleonConfig
    sampling: LuminaSampling

    equal_branches: ClassVar[bool] = False
    networks = (Lumina, Chameleon)
    decoding = Decoding("tf32")

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"weights": partial(clean_lumina, config=self.transformer), "tokenizer": clean_chameleon}

    def _read_text(self, device: torch.device | str) -> tuple[LuminaTokens, str]:
        if self.weights == "random":
            return hash_tokens(self.transformer), ""
        make = partial(read_tokens, config=self.transformer)
        return read_tokenizer(self.sources["text"], make, "Lumina-mGPT")

    def load(self, device: torch.device | str) -> None:
        """Build and fill the networks as `ImageModel.load`, and set the code of each token."""
        super().load(device)
        missing = self.transformer.vocabulary - len(self._text.codes)
        self._codes = F.pad(self._text.codes, (0, missing), value=-1).to(device)

    def _forbid(self) -> Callable[[int], Tensor]:
        return forbid(self._codes, self._text.marks.newline, self.transformer.line)

    def _find_codes(self, tokens: Tensor) -> Tensor:
        return self._codes[tokens.unflatten(1, (-1, self.transformer.line))[..., :-1]]


def forbid(codes: Tensor, newline: int, line: int) -> Callable[[int], Tensor]:
    """Return a function from an image token's number, from 0, to the tokens that it cannot be, bool [tokens].

    Args:
        codes: int64 [tokens], the image code of each token, -1 where it is no code.
        newline: token that ends a line, and only a line.
        line: tokens of a line, its newline included.
    """
    others, words = torch.arange(len(codes), device=codes.device) != newline, codes < 0
    return lambda token: words if (token + 1) % line else others
