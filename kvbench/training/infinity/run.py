"""Training of `infinity_tiny`: scenes -> tokenizer -> latents -> transformer -> feature network."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from kvbench.models.base import Model
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.parts.text import VocabularyEncoder
from kvbench.scenes import grammar
from kvbench.training.autoencoder import start
from kvbench.training.base import ImageTraining, write_weights
from kvbench.training.features import FeatureRecipe, train_features
from kvbench.training.infinity.tokenizer import TokenizerRecipe, encode, make_loss
from kvbench.training.infinity.transformer import Corpus, TextToBits, TransformerRecipe, draw_batch
from kvbench.training.loop import generator
from kvbench.training.scenes import draw_scenes


@dataclass(frozen=True, kw_only=True)
class InfinityTraining(ImageTraining):
    """`train=infinity_tiny`; see `ImageTraining` for the other settings.

    Attributes:
        features: recipe of the feature network.
    """

    kind: ClassVar[type[Model]] = InfinityModel
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    transformer: TransformerRecipe = field(default_factory=TransformerRecipe)
    features: FeatureRecipe = field(default_factory=FeatureRecipe)

    def _train(self, model: InfinityModel, out: Path) -> None:
        images, captions = draw_scenes(self.pool, self.seed, self.threads)
        bsq = start(lambda: BSQ(model.tokenizer), self.tokenizer.seed).to(self.device)
        segments = model.spec.segments
        sizes = [(segment.height, segment.width) for segment in segments]
        self._fit_tokenizer(bsq, make_loss(bsq, images, sizes, self.tokenizer, compiled=self.compiled), out)
        words = [grammar.tokenize(caption) for caption in captions]
        padded = torch.tensor([[*ids, *[0] * (grammar.MAX_TOKENS - len(ids))] for ids in words])
        corpus = Corpus(encode(bsq, images), padded, bsq.amplitudes.detach().cpu())
        del images
        network = TextToBits(VocabularyEncoder(model.text_config), Infinity(model.transformer))
        rng = generator(self.transformer.seed, 3)
        network.text.init_weights(rng)
        network.transformer.init_weights(rng)
        draw = partial(draw_batch, corpus, segments, self.transformer)
        weights = self._fit_transformer(network, draw, out, partial(self.transformer.rate_by_cost, segments))
        for part in ("transformer", "text"):
            write_weights(out / f"{part}.safetensors", weights, self.transformer, part)
        train_features(out / "features.safetensors", self.features, self.device)
