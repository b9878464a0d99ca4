"""LlamaGen: settings and shapes without weights, then classes or captions to images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.models.base import read_labels, refuse
from kvbench.models.files.checkpoints import Clean, WeightsError
from kvbench.models.files.official_files import clean_decoder, clean_vqgan
from kvbench.models.llamagen.captions import clean_caption
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.next_token import NextTokenImageModel
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.text import (
    HashedText,
    TextEncoder,
    VocabularyConfig,
    check_heads,
    load_t5,
    load_vocabulary,
)
from kvbench.scenes import grammar


@dataclass
class LlamaGenModel(NextTokenImageModel[LlamaGen, VQ]):
    """LlamaGen at any size.

    A prompt is a caption or, without a text encoder, a class number, -1 for no class; later words, such as the class's
    name, are ignored. Sources are `transformer`, `tokenizer` and, with a text encoder, `text`.

    Attributes:
        text: `t5` (Flan-T5 of transformers; captions are cleaned and padded in front, as in the official code),
            `vocabulary` (the closed vocabulary of the scenes grammar; end tokens pad captions), or None for classes.
        text_layers: layers of the vocabulary encoder.
        text_heads: heads of the vocabulary encoder.
    """

    transformer: LlamaGenConfig
    text: Literal["t5", "vocabulary"] | None = None
    text_layers: int = 2
    text_heads: int = 4

    networks = (LlamaGen, VQ)
    decoding = Decoding("tf32", products=True)

    def __post_init__(self) -> None:
        self._check_codes("vocabulary", self.transformer.vocabulary)
        if (self.text is None) != (self.transformer.text_width is None):
            raise ValueError(
                f"model.text={self.text}: model.transformer.text_width is {self.transformer.text_width}; "
                "give both for captions, neither for classes"
            )
        if self.text == "vocabulary":
            check_heads(self, self.text_heads, self.text_config.width)
            longest, tokens = grammar.VOCABULARY.longest, self.transformer.text_tokens
            rule = f"be at least {longest}, as model.text=vocabulary fills captions to {longest} words"
            refuse("model.transformer", self.transformer, text_tokens=(tokens < longest, rule))
        super().__post_init__()
        self._check_sources(*(["text"] if self.text else []))

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return self.transformer.segments(self.transformer.condition, self.chunk)

    @property
    def text_config(self) -> VocabularyConfig:
        """Shape of the closed-vocabulary encoder, for a model with text."""
        config = self.transformer
        assert config.text_width is not None
        return VocabularyConfig(
            len(grammar.VOCABULARY), config.text_tokens, config.text_width, self.text_layers, self.text_heads
        )

    @property
    def _passes(self) -> list[tuple[object, str]]:
        return [(self._transformer.cls_embedding, "forward"), *super()._passes]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check that every prompt begins with a class number, or has only words of the vocabulary."""
        if self.text is None:
            read_labels(prompts, self.transformer.classes, self.name)
        elif self.text == "vocabulary":
            grammar.VOCABULARY.check(prompts)

    def _embed(self, prompts: Sequence[str]) -> tuple[Tensor, list[int] | None]:
        """Embed classes or captions; the unconditional branch has the same padding as the conditional one."""
        branches = self.sampling.branches
        embed = partial(self._transformer.cls_embedding, guided=branches > 1)
        if self._text is None:
            labels = read_labels(prompts, self.transformer.classes, self.name)
            return embed(torch.tensor(labels, device=self._device)), None
        capacity, dtype = self.transformer.text_tokens, self._transformer.output.weight.dtype
        if self.text == "vocabulary":
            return embed(self._text.encode(prompts).pad(capacity)[0].to(dtype)), None
        captions = prompts if self.weights == "random" else [clean_caption(prompt) for prompt in prompts]
        text = self._text.encode(captions)
        features = text.pad(capacity, front=True)[0].to(dtype)
        return embed(features), [capacity - length for length in text.lengths] * branches

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"transformer": clean_decoder, "tokenizer": clean_vqgan}

    def _read_text(self, device: torch.device | str) -> tuple[TextEncoder | None, str]:
        config = self.transformer
        if config.text_width is None:
            return None, ""
        if self.text == "vocabulary":
            return load_vocabulary(
                self._source("text"), self.text_config, grammar.VOCABULARY.tokenize_filled, device
            )
        if self.weights == "random":
            return HashedText(config.text_width, device, config.text_tokens), ""
        if find_spec("ftfy") is None:
            raise WeightsError("model.text=t5: install the `text` extra, which cleans captions")
        return load_t5(self.sources["text"], device, self.compute_dtype(device), config.text_tokens)
