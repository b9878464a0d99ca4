"""Training of `llamagen_tiny`: scenes -> tokenizer -> tokens -> transformer and text encoder."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from kvbench.extras.training.autoencoder import start
from kvbench.extras.training.base import ImageTraining, write_weights
from kvbench.extras.training.llamagen.tokenizer import VQRecipe, encode, make_loss
from kvbench.extras.training.llamagen.transformer import (
    CaptionToTokens,
    NextTokenRecipe,
    TokenCorpus,
    draw_batch,
)
from kvbench.extras.training.loop import generator
from kvbench.extras.training.scenes import draw_scenes
from kvbench.models.base import Model
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.llamagen.transformer import LlamaGen
from kvbench.models.parts.text import VocabularyEncoder
from kvbench.scenes import grammar


@dataclass(frozen=True, kw_only=True)
class LlamaGenTraining(ImageTraining):
    """`train=llamagen_tiny`; see `ImageTraining` for its settings."""

    kind: ClassVar[type[Model]] = LlamaGenModel
    tokenizer: VQRecipe = field(default_factory=VQRecipe)
    transformer: NextTokenRecipe = field(default_factory=NextTokenRecipe)

    def _train(self, model: LlamaGenModel, out: Path) -> None:
        images, captions = draw_scenes(self.pool, self.seed, self.threads)
        vq = start(lambda: VQ(model.tokenizer), self.tokenizer.seed).to(self.device)
        self._fit_tokenizer(vq, make_loss(vq, images, self.tokenizer, compiled=self.compiled), out)
        words = torch.tensor([grammar.VOCABULARY.tokenize_filled(caption) for caption in captions])
        corpus = TokenCorpus(encode(vq, images), words)
        del images
        network = CaptionToTokens(VocabularyEncoder(model.text_config), LlamaGen(model.transformer))
        network.init_weights(generator(self.transformer.seed, 3))
        draw = partial(draw_batch, corpus, self.transformer, model.transformer.vocabulary)
        weights = self._fit_transformer(network, draw, out)
        for part in ("transformer", "text"):
            write_weights(out / f"{part}.safetensors", weights, self.transformer, part)
