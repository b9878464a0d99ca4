"""Janus-Pro: settings and shapes without weights, then prompts to images."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kvbench.core.segments import Segment
from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.prompt import HashedTokens, JanusTokenizer, JanusTokens
from kvbench.models.janus.transformer import Janus, JanusConfig
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.next_token import PromptedImageModel
from kvbench.models.tokens import read_tokenizer
from kvbench.models.weights import build_on_meta, check_sources, fill


@dataclass
class JanusModel(PromptedImageModel[Janus, VQ]):
    """Janus-Pro at any size; the image tokenizer is LlamaGen's.

    Sources are `weights` (language model and image tokenizer) and `text` (`tokenizer.json`).

    Differs from the official program in: it rotates in float32, decodes in float32, and takes several prompts at once.
    """

    transformer: JanusConfig

    def __post_init__(self) -> None:
        self._check_codes("codes", self.transformer.codes)
        super().__post_init__()
        if self.weights == "files":
            check_sources(self.sources, "weights", "text")

    @property
    def _grid(self) -> tuple[int, int]:
        return self.transformer.image

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return self.transformer.segments(self.prompt_tokens, self.chunk)

    def _build(self) -> tuple[Janus, VQ]:
        return build_on_meta(lambda: Janus(self.transformer)), build_on_meta(lambda: VQ(self.tokenizer))

    def _fill(self) -> list[str]:
        both = nn.ModuleDict(
            {"transformer": self._transformer, "tokenizer": self._tokenizer}
        )  # one file has both
        return [fill(both, self._source("weights"), partial(clean_janus, head_dim=self.transformer.head_dim))]

    def _read_text(self, device: torch.device | str) -> tuple[JanusTokens, list[str]]:
        if self.weights == "random":
            return HashedTokens(self.transformer.vocabulary), []
        tokenizer, digest = read_tokenizer(self.sources["text"], JanusTokenizer, "Janus-Pro")
        return tokenizer, [digest]
