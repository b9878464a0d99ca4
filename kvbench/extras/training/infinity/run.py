"""Trainings of Infinity's classes: captioned images -> tokenizer -> latents -> transformer, then what is their own."""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.files import resolve_path
from kvbench.extras.training.autoencoder import encode_latents, start
from kvbench.extras.training.base import ImageTraining, write_weights
from kvbench.extras.training.features import FeatureRecipe, train_features
from kvbench.extras.training.infinity.tokenizer import TokenizerRecipe, make_loss
from kvbench.extras.training.infinity.transformer import Corpus, TextToBits, TransformerRecipe, draw_batch
from kvbench.extras.training.loop import generator
from kvbench.extras.training.pictures import draw_pictures, list_names
from kvbench.extras.training.scenes import draw_scenes
from kvbench.models.base import Model
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.parts.text import VocabularyEncoder
from kvbench.scenes.names import Name, read_names, write_names


@dataclass(frozen=True, kw_only=True)
class CaptionTraining(ImageTraining):
    """Base class of the trainings of an `InfinityModel` with a closed vocabulary; see `ImageTraining`."""

    kind: ClassVar[type[Model]] = InfinityModel
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    transformer: TransformerRecipe = field(default_factory=TransformerRecipe)

    @abstractmethod
    def _draw(self, model: InfinityModel, out: Path) -> tuple[Tensor, list[str]]:
        """Draw `pool` images uint8 [pool, H, W, 3] and their captions.

        Raises:
            ConfigError: they do not fit the model.
        """

    def _train(self, model: InfinityModel, out: Path) -> None:
        vocabulary = model.vocabulary
        images, captions = self._draw(model, out)
        bsq = start(lambda: BSQ(model.tokenizer), self.tokenizer.seed).to(self.device)
        segments = model.spec.segments
        sizes = [(segment.height, segment.width) for segment in segments]
        self._fit_tokenizer(bsq, make_loss(bsq, images, sizes, self.tokenizer, compiled=self.compiled), out)
        rows = [vocabulary.tokenize(caption) for caption in captions]
        padded = torch.tensor([[*row, *[0] * (vocabulary.longest - len(row))] for row in rows])
        latents = encode_latents(bsq.encoder, images, model.tokenizer.networks, bsq.amplitudes.device)
        corpus = Corpus(latents, padded, bsq.amplitudes.detach().cpu())
        del images
        network = TextToBits(VocabularyEncoder(model.text_config), Infinity(model.transformer))
        rng = generator(self.transformer.seed, 3)
        network.text.init_weights(rng)
        network.transformer.init_weights(rng)
        draw = partial(draw_batch, corpus, segments, self.transformer)
        weights = self._fit_transformer(network, draw, out, partial(self.transformer.rate_by_cost, segments))
        for part in ("transformer", "text"):
            write_weights(out / f"{part}.safetensors", weights, self.transformer, part)


@dataclass(frozen=True, kw_only=True)
class InfinityTraining(CaptionTraining):
    """`train=infinity_tiny`; see `ImageTraining` for the other settings.

    Attributes:
        features: recipe of the feature network.
    """

    features: FeatureRecipe = field(default_factory=FeatureRecipe)

    def _draw(self, model: InfinityModel, out: Path) -> tuple[Tensor, list[str]]:
        return draw_scenes(self.pool, self.seed, self.threads)

    def _train(self, model: InfinityModel, out: Path) -> None:
        super()._train(model, out)
        train_features(out / "features.safetensors", self.features, self.device)


@dataclass(frozen=True, kw_only=True)
class PictureTraining(CaptionTraining):
    """`train=infinity_emoji`; see `ImageTraining` for the other settings.

    Attributes:
        pictures: folder of the unpacked npm package emoji-datasource-google (`kvbench.extras.training.pictures`).
    """

    pictures: str

    def _draw(self, model: InfinityModel, out: Path) -> tuple[Tensor, list[str]]:
        folder = Path(self.pictures).expanduser()
        try:
            names = list_names(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"train.pictures={self.pictures}: cannot be read ({error})") from None
        write_names(out / "names.csv", names)
        trained = [name for name in names if name.split == "train"]
        self._check_names(model, names, out / "names.csv")
        return draw_pictures(folder, trained, self.pool, self.seed)

    def _check_names(self, model: InfinityModel, names: tuple[Name, ...], path: Path) -> None:
        """Check that the folder has the names of the model; raises ConfigError otherwise."""
        known = () if model.captions == "scenes" else read_names(resolve_path(model.captions))
        if names != known:
            first = next((name.caption for name in names if name not in known), "one less")
            raise ConfigError(
                f"train.pictures={self.pictures}: not the names of model.captions={model.captions} ({first}); "
                f"add model.captions={path} to train on the names of the folder"
            )
