"""Training of `var_tiny`: scenes of one object -> tokenizer -> latents -> transformer."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from kvbench.extras.training.autoencoder import encode_latents
from kvbench.extras.training.base import ImageTraining, write_weights
from kvbench.extras.training.loop import generator
from kvbench.extras.training.scenes import draw_classes
from kvbench.extras.training.var.tokenizer import VARTokenizerRecipe, make_loss, make_tokenizer
from kvbench.extras.training.var.transformer import ClassCorpus, ClassToTokens, VARRecipe, draw_batch
from kvbench.models.base import Model
from kvbench.models.var.model import VARModel
from kvbench.models.var.transformer import VAR
from kvbench.scenes import grammar


@dataclass(frozen=True, kw_only=True)
class VARTraining(ImageTraining):
    """`train=var_tiny`; see `ImageTraining` for its settings."""

    kind: ClassVar[type[Model]] = VARModel
    tokenizer: VARTokenizerRecipe = field(default_factory=VARTokenizerRecipe)
    transformer: VARRecipe = field(default_factory=VARRecipe)

    def _train(self, model: VARModel, out: Path) -> None:
        images, labels = draw_classes(self.pool, self.seed, self.threads)
        vq = make_tokenizer(model.tokenizer, self.tokenizer.seed).to(self.device)
        sizes = [(side, side) for side in model.transformer.sides]
        self._fit_tokenizer(vq, make_loss(vq, images, sizes, self.tokenizer, compiled=self.compiled), out)
        latents = encode_latents(vq.latents, images, vq.config.networks, vq.quantize.embedding.weight.device)
        corpus = ClassCorpus(latents, labels, len(grammar.PAIRS))
        del images
        network = ClassToTokens(VAR(model.transformer))
        network.transformer.init_weights(generator(self.transformer.seed, 3))
        segments = model.transformer.segments
        draw = partial(draw_batch, corpus, vq.cpu(), segments, self.transformer)
        weights = self._fit_transformer(network, draw, out, partial(self.transformer.rate_by_cost, segments))
        write_weights(out / "transformer.safetensors", weights, self.transformer, "transformer")
