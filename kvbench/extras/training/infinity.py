"""Trainings of Infinity's classes: captioned images -> tokenizer -> latents -> transformer and text encoder.

Shapes: B samples, d bits, latents [B, d, H, W], t_k tokens of scale k. `flip`, float32 [B] on the CPU, has each
sample's probability of a flipped bit.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.config import ConfigError
from kvbench.core.files import resolve_path
from kvbench.core.segments import Segment
from kvbench.extras.training.autoencoder import (
    AutoencoderRecipe,
    Encode,
    draw_last_scales,
    encode_images,
    start,
)
from kvbench.extras.training.base import ImageTraining, write_weights
from kvbench.extras.training.features import FeatureRecipe, train_features
from kvbench.extras.training.images import draw_pictures, draw_scenes
from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import NextScaleRecipe, Stage, token_weights
from kvbench.models.base import Model
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.parts.autoencoder import Size
from kvbench.models.parts.text import VocabularyEncoder
from kvbench.scenes.names import read_names


@dataclass(frozen=True)
class TokenizerRecipe(AutoencoderRecipe[BSQ]):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for the other settings.

    Attributes:
        prefix: share of each batch that is decoded from its first scales only, so that they describe the whole image.
        longest_prefix: maximum number of first scales in such a prefix.
        flip: maximum flip probability; each sample's is uniform on [0, flip], or 0 for half of the samples.
    """

    hold: float = 0.4
    average: float = 0.995
    prefix: float = 0.5
    longest_prefix: int = 7
    flip: float = 0.04

    def _coders(self, network: BSQ) -> tuple[Encode, Encode]:
        return network.encoder, network.decoder

    def _quantise(
        self, network: BSQ, latents: Tensor, sizes: Sequence[Size], _: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        flip = torch.rand(self.batch, generator=rng) * self.flip
        flip = flip * (torch.rand(self.batch, generator=rng) < 0.5)
        last = draw_last_scales(self.batch, self.prefix, self.longest_prefix, len(sizes), rng)
        sums, commitment = straight_through_sums(latents, sizes, network.amplitudes, flip, rng)
        rows = torch.arange(self.batch, device=latents.device)
        return sums[last.to(latents.device), rows], 0.1 * commitment


def self_corrected_bits(
    latents: Tensor, sizes: Sequence[Size], amplitudes: Tensor, flip: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return targets bool [B, sum t_k, d] and inputs float32 [B, sum t_k - t_0, d] of scales from 1 on.

    The targets of a scale are the residual's signs. The codes in the running sum, of magnitude amplitude/sqrt(d), have
    flipped bits, so that later targets correct earlier mistakes (Infinity section 3.3). `sizes` is a prefix of the
    schedule.
    """
    batch, channels, height, width = latents.shape
    summed = torch.zeros_like(latents)
    targets: list[Tensor] = []
    inputs: list[Tensor] = []
    for scale, size in enumerate(sizes):
        if scale:
            resized = F.interpolate(summed, size, mode="bilinear", align_corners=False)
            inputs.append(resized.flatten(2).transpose(1, 2))
        residual = latents - summed
        bits = F.interpolate(residual, size, mode="area") > 0
        targets.append(bits.flatten(2).transpose(1, 2))
        flipped = bits ^ (torch.rand(bits.shape, generator=rng) < flip[:, None, None, None])
        codes = (flipped.float() * 2 - 1) * (amplitudes[scale] / channels**0.5)
        summed = summed + F.interpolate(codes, (height, width), mode="bilinear", align_corners=False)
    return torch.cat(targets, 1), torch.cat(inputs, 1) if inputs else latents.new_zeros(batch, 0, channels)


def straight_through_sums(
    latents: Tensor, sizes: Sequence[Size], amplitudes: Tensor, flip: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Quantise with gradients; return the sums after each scale [scales, B, d, H, W] and the commitment loss.

    A code is its sign in the forward pass and the residual in the backward pass, so that the encoder learns from any
    prefix of scales and the amplitudes learn from the forward value. The commitment loss is the mean squared distance
    of residuals to codes.
    """
    channels, grid = latents.shape[1], latents.shape[2:]
    summed = torch.zeros_like(latents)
    sums: list[Tensor] = []
    commitment = latents.new_zeros(())
    for scale, size in enumerate(sizes):
        residual = F.interpolate(latents - summed, size, mode="area")
        flips = (torch.rand(residual.shape, generator=rng) < flip[:, None, None, None]).to(residual.device)
        signs = torch.where((residual > 0) ^ flips, 1.0, -1.0)
        codes = signs * (amplitudes[scale] / channels**0.5)
        commitment = commitment + (residual - codes.detach()).square().mean()
        codes = codes + residual - residual.detach()
        summed = summed + F.interpolate(codes, grid, mode="bilinear", align_corners=False)
        sums.append(summed)
    return torch.stack(sums), commitment / len(sizes)


@dataclass(frozen=True)
class TransformerRecipe(NextScaleRecipe):
    """Settings of the transformer's training; see `NextScaleRecipe` for the other settings.

    Attributes:
        text_dropout: share of samples with the learned unconditional text.
        input_dropout: share of (sample, scale) pairs with zero features, whose content must come from the keys and
            values of earlier scales.
        flip: maximum flip probability; each sample's is uniform on [0, flip], or 0 for a quarter of the samples.
    """

    stages: tuple[Stage, ...] = (Stage(3, 128, 1200), Stage(6, 64, 5600), Stage(9, 32, 1000))
    text_dropout: float = 0.1
    input_dropout: float = 0.1
    flip: float = 0.25


@dataclass(frozen=True)
class Corpus:
    """Encoded images on the CPU: latents float16 [N, d, H, W], token ids int64 [N, words] (0 pads), amplitudes."""

    latents: Tensor
    tokens: Tensor
    amplitudes: Tensor


class TextToBits(nn.Module):
    """Text encoder and transformer as one module, for training in one pass."""

    def __init__(self, text: VocabularyEncoder, transformer: Infinity) -> None:
        super().__init__()
        self.text, self.transformer = text, transformer

    def forward(
        self,
        tokens: Tensor,
        dropped: Tensor,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        segments: Sequence[Segment],
    ) -> Tensor:
        """Return the weighted mean negative log-likelihood of the bits in nats, a scalar.

        Args:
            tokens: int64 [B, words], 0 for padding.
            dropped: bool [B], samples with the unconditional text.
            inputs: float32 [B, sum t_k - t_0, d].
            targets: bool [B, sum t_k, d].
            weights: float32 [sum t_k], weight of each token, mean 1.
            segments: the scales to train on.
        """
        mask = tokens > 0
        values = self.text(tokens)
        blank = self.transformer.cfg_uncond[: tokens.shape[1]].expand_as(values)
        values = torch.where(dropped[:, None, None], blank, values)
        logits = self.transformer(values, mask, inputs, segments).unflatten(-1, (-1, 2))
        margin = (logits[..., 1] - logits[..., 0]).float()
        loss = F.binary_cross_entropy_with_logits(margin, targets.float(), reduction="none")
        return (loss.mean(-1) * weights).mean()


def draw_batch(
    corpus: Corpus, segments: Sequence[Segment], recipe: TransformerRecipe, step: int
) -> tuple[object, ...]:
    """Sample the arguments of `TextToBits.forward` on the CPU, which depend on the step alone.

    `segments` is the whole schedule of scales.
    """
    stage = recipe.find_stage(step)
    rng = generator(recipe.seed, 1, step)
    segments = segments[: stage.scales]
    index = torch.randint(len(corpus.latents), (stage.batch,), generator=rng)
    flip = torch.rand(stage.batch, generator=rng) * recipe.flip
    flip = flip * (torch.rand(stage.batch, generator=rng) < 0.75)
    targets, inputs = self_corrected_bits(
        corpus.latents[index].float(), [(s.height, s.width) for s in segments], corpus.amplitudes, flip, rng
    )
    blank = torch.rand(stage.batch, len(segments), generator=rng) < recipe.input_dropout
    lengths = torch.tensor([s.length for s in segments[1:]])
    inputs = inputs * ~blank[:, 1:].repeat_interleave(lengths, 1)[..., None]
    dropped = torch.rand(stage.batch, generator=rng) < recipe.text_dropout
    return corpus.tokens[index], dropped, inputs, targets, token_weights(segments), segments


@dataclass(frozen=True, kw_only=True)
class CaptionTraining(ImageTraining):
    """Base class of the trainings of an `InfinityModel` with a closed vocabulary; see `ImageTraining`."""

    kind: ClassVar[type[Model]] = InfinityModel
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    transformer: TransformerRecipe = field(default_factory=TransformerRecipe)

    @abstractmethod
    def _draw(self, model: InfinityModel) -> tuple[Tensor, list[str]]:
        """Sample images uint8 [pool, H, W, 3] and their captions; raise ConfigError if they do not fit the model."""

    def _train(self, model: InfinityModel, out: Path) -> None:
        vocabulary = model.vocabulary
        images, captions = self._draw(model)
        bsq, segments = start(partial(BSQ, model.tokenizer), self.tokenizer.seed), model.spec.segments
        self._fit_tokenizer(bsq, images, [(segment.height, segment.width) for segment in segments], out)
        rows = [vocabulary.tokenize(caption) for caption in captions]
        padded = torch.tensor([[*row, *[0] * (vocabulary.longest - len(row))] for row in rows])
        latents = encode_images(bsq.encoder, images, torch.device(self.device), torch.float16)
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

    def _draw(self, model: InfinityModel) -> tuple[Tensor, list[str]]:
        return draw_scenes(self.pool, self.seed, self.threads)

    def _train(self, model: InfinityModel, out: Path) -> None:
        super()._train(model, out)
        train_features(out / "features.safetensors", self.features, self.device)


@dataclass(frozen=True, kw_only=True)
class PictureTraining(CaptionTraining):
    """`train=infinity_emoji`; see `ImageTraining` for the other settings.

    Attributes:
        pictures: folder of the unpacked npm package emoji-datasource-google; `model.captions` names its pictures.
    """

    pictures: str

    def _draw(self, model: InfinityModel) -> tuple[Tensor, list[str]]:
        known = () if model.captions == "scenes" else read_names(resolve_path(model.captions))
        names = [name for name in known if name.split == "train"]
        if not names:
            raise ConfigError(
                f"model.captions={model.captions}: must be a file with names of pictures to train on"
            )
        try:
            return draw_pictures(Path(self.pictures).expanduser(), names, self.pool, self.seed)
        except (OSError, ValueError) as error:
            raise ConfigError(f"train.pictures={self.pictures}: cannot be read ({error})") from None
