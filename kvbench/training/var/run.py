"""Training of `var_tiny`: scenes of one object -> tokenizer -> latents -> transformer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from kvbench.models.base import Model
from kvbench.models.var.model import VARModel
from kvbench.models.var.transformer import VAR
from kvbench.scenes import grammar
from kvbench.training.base import Training, write_weights
from kvbench.training.loop import generator
from kvbench.training.scenes import draw_classes
from kvbench.training.var.tokenizer import VARTokenizerRecipe, encode, make_tokenizer, train_tokenizer
from kvbench.training.var.transformer import ClassCorpus, ClassToTokens, VARRecipe, train_transformer


@dataclass(frozen=True, kw_only=True)
class VARTraining(Training):
    """`train=var_tiny`; see `Training` for settings that are not listed.

    Attributes:
        tokenizer: recipe of the tokenizer.
        transformer: recipe of the transformer.
    """

    kind: ClassVar[type[Model]] = VARModel
    tokenizer: VARTokenizerRecipe = field(default_factory=VARTokenizerRecipe)
    transformer: VARRecipe = field(default_factory=VARRecipe)

    def _train(self, model: VARModel, out: Path) -> None:
        images, labels = draw_classes(self.pool, self.seed, self.threads)
        vq = make_tokenizer(model.tokenizer, self.tokenizer.seed).to(self.device)
        weights = train_tokenizer(
            vq,
            images,
            [(side, side) for side in model.transformer.sides],
            self.tokenizer,
            out / "tokenizer.checkpoint.safetensors",
            compiled=self.compiled,
        )
        vq.load_state_dict(weights)
        write_weights(out / "tokenizer.safetensors", weights, self.tokenizer)
        corpus = ClassCorpus(encode(vq, images), labels, len(grammar.PAIRS))
        del images
        network = ClassToTokens(VAR(model.transformer))
        network.transformer.init_weights(generator(self.transformer.seed, 3))
        weights = train_transformer(
            network.to(self.device),
            corpus,
            vq.cpu(),
            self.transformer,
            out / "transformer.checkpoint.safetensors",
            compiled=self.compiled,
        )
        write_weights(out / "transformer.safetensors", weights, self.transformer, "transformer")
