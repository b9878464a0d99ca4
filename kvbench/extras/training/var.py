"""Training of `var_tiny`: scenes of one object -> tokenizer -> latents -> transformer.

The tokenizer trains as an autoencoder, then k-means finds the codes, then the decoder trains on codes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import Segment
from kvbench.extras.training.autoencoder import (
    AutoencoderRecipe,
    Encode,
    draw_last_scales,
    encode_images,
    find_codes,
    start,
)
from kvbench.extras.training.base import ImageTraining, write_weights
from kvbench.extras.training.images import draw_classes
from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import NextScaleRecipe, Stage, token_weights
from kvbench.models.base import Model
from kvbench.models.parts.autoencoder import Size
from kvbench.models.var.loop import make_features
from kvbench.models.var.model import VARModel
from kvbench.models.var.tokenizer import VQVAE, VQConfig, shrink
from kvbench.models.var.transformer import VAR
from kvbench.scenes import grammar

CODEBOOK_BATCHES = 24
"""Number of batches of images whose residuals k-means clusters."""
KMEANS_ROUNDS = 2
"""Number of runs of k-means, each on the residuals under the previous codes."""


@dataclass(frozen=True)
class VARTokenizerRecipe(AutoencoderRecipe[VQVAE]):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for the other settings.

    Unlike in VAR (arXiv:2404.02905, section 3.2) codes are not learnt by gradients, because latents would move away and
    leave most of a small codebook unused. There is no adversarial and no perceptual loss.

    Attributes:
        free: number of first steps without a codebook, in which the encoder learns and noise is added to latents.
        noise: standard deviation of this noise, as a share of the latents' standard deviation.
        prefix: share of such a step's batch that is decoded from its first scales only, so that they describe the whole
            image.
        longest_prefix: maximum number of first scales in such a prefix.
    """

    steps: int = 1600
    free: int = 900
    noise: float = 0.1
    prefix: float = 0.5
    longest_prefix: int = 7

    @property
    def encoder_steps(self) -> int:
        """Number of first steps in which the encoder learns."""
        return self.free

    def _coders(self, network: VQVAE) -> tuple[Encode, Encode]:
        return network.latents, nn.Sequential(network.post_quant_conv, network.decoder)

    @torch.no_grad()
    def _find_codebook(
        self, network: VQVAE, encode: Callable[[int], Tensor], sizes: Sequence[Size], rng: torch.Generator
    ) -> None:
        book, latents = network.quantize.embedding.weight, encode(CODEBOOK_BATCHES)
        for search in range(KMEANS_ROUNDS):
            residuals = [residual for residual, _ in walk_scales(network, latents, sizes, exact=not search)]
            vectors = torch.cat([residual.movedim(1, -1).flatten(0, 2) for residual in residuals])
            book.copy_(find_codes(vectors.cpu(), len(book), rng))

    def _quantise(
        self, network: VQVAE, latents: Tensor, sizes: Sequence[Size], step: int, rng: torch.Generator
    ) -> tuple[Tensor, float]:
        if step >= self.free:
            return network.encode(latents, sizes)[1], 0.0
        sums = torch.stack([summed for _, summed in walk_scales(network, latents, sizes, exact=True)])
        last = draw_last_scales(self.batch, self.prefix, self.longest_prefix, len(sizes), rng)
        noise = torch.randn(latents.shape, generator=rng).to(latents.device)
        summed = sums[last.to(latents.device), torch.arange(self.batch, device=latents.device)]
        return summed + self.noise * latents.detach().std() * noise, 0.0


def make_tokenizer(config: VQConfig, seed: int) -> VQVAE:
    """Build a tokenizer to train: random weights from a seed, closed branches, codes without gradients.

    The convolutions of scales are the identity and are not trained, so that the scales' codes add up to the latents.
    """
    vq = start(lambda: VQVAE(config), seed)
    vq.quantize.requires_grad_(False)
    for name, parameter in vq.quantize.quant_resi.named_parameters():
        (nn.init.dirac_ if name.endswith("weight") else nn.init.zeros_)(parameter)
    return vq


def walk_scales(
    vq: VQVAE, latents: Tensor, sizes: Sequence[Size], *, exact: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each scale's residual [B, channels, h, w] and the sum of codes after it [B, channels, H, W].

    Latents are float32 [B, channels, H, W]. With `exact` the codes are the residuals themselves.
    """
    summed = torch.zeros_like(latents)
    for scale, size in enumerate(sizes):
        residual = shrink(latents - summed, size)
        codes = residual.movedim(1, -1) if exact else vq.codes(vq.nearest(residual))
        summed = vq.add(summed, codes, scale, len(sizes))
        yield residual, summed


@dataclass(frozen=True)
class VARRecipe(NextScaleRecipe):
    """Settings of the transformer's training; see `NextScaleRecipe` for the other settings.

    Attributes:
        class_dropout: share of samples without a class.
        wrong: maximum share of random tokens of a sample, which later scales learn to correct; each sample's share is
            uniform on [0, wrong], or 0 for half of the samples.
    """

    stages: tuple[Stage, ...] = (Stage(3, 128, 800), Stage(6, 64, 2400), Stage(9, 32, 800))
    class_dropout: float = 0.1
    wrong: float = 0.1


@dataclass(frozen=True)
class ClassCorpus:
    """Encoded scenes on the CPU: latents float16 [N, channels, H, W], classes int64 [N], number of classes."""

    latents: Tensor
    labels: Tensor
    classes: int


class ClassToTokens(nn.Module):
    """Transformer as a module for training in one pass."""

    def __init__(self, transformer: VAR) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(
        self, labels: Tensor, features: Tensor, targets: Tensor, weights: Tensor, scales: int
    ) -> Tensor:
        """Return the weighted mean negative log-likelihood of the tokens in nats, a scalar.

        Args:
            labels: int64 [B], `config.classes` for no class.
            features: float32 [B, sum t_k - t_0, channels].
            targets: int64 [B, sum t_k].
            weights: float32 [sum t_k], weight of each token, mean 1.
            scales: number of scales to train on.
        """
        logits = self.transformer(labels, features, scales)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (loss.view_as(targets) * weights).mean()


@torch.no_grad()
def corrected_tokens(
    vq: VQVAE, latents: Tensor, segments: Sequence[Segment], scales: int, wrong: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return targets int64 [B, sum t_k] and inputs float32 [B, sum t_k - t_0, channels] of scales from 1 on.

    The targets of a scale are the codes nearest to the residual. In the running sum random codes replace some of them,
    so that later targets correct earlier mistakes (as Infinity does with bits, arXiv:2412.04431, section 3.3).

    Args:
        vq: the tokenizer, on the CPU.
        latents: float32 [B, channels, H, W].
        segments: the whole schedule.
        scales: number of leading scales to use.
        wrong: float32 [B], probability that a token of the sample is replaced.
        rng: source of the replacements.
    """
    summed = torch.zeros_like(latents)
    targets, inputs = [], [latents.new_zeros(len(latents), 0, latents.shape[1])]
    for segment in segments[:scales]:
        if segment.index:
            inputs.append(make_features(summed, segment))
        tokens = vq.nearest(shrink(latents - summed, (segment.height, segment.width)))
        targets.append(tokens.flatten(1))
        replaced = torch.rand(tokens.shape, generator=rng) < wrong[:, None, None]
        others = torch.randint(vq.config.codes, tokens.shape, generator=rng)
        codes = vq.codes(torch.where(replaced, others, tokens))
        summed = vq.add(summed, codes, segment.index, len(segments))
    return torch.cat(targets, 1), torch.cat(inputs, 1)


def draw_batch(
    corpus: ClassCorpus, vq: VQVAE, segments: Sequence[Segment], recipe: VARRecipe, step: int
) -> tuple[Tensor | int, ...]:
    """Sample the arguments of `ClassToTokens.forward` on the CPU, which depend on the step alone.

    `segments` is the whole schedule of scales.
    """
    stage = recipe.find_stage(step)
    rng = generator(recipe.seed, 1, step)
    index = torch.randint(len(corpus.latents), (stage.batch,), generator=rng)
    wrong = torch.rand(stage.batch, generator=rng) * recipe.wrong
    wrong = wrong * (torch.rand(stage.batch, generator=rng) < 0.5)
    latents = corpus.latents[index].float()
    targets, inputs = corrected_tokens(vq, latents, segments, stage.scales, wrong, rng)
    # The last row of the class embedding is for samples without a class.
    dropped = torch.rand(stage.batch, generator=rng) < recipe.class_dropout
    labels = corpus.labels[index].masked_fill(dropped, corpus.classes)
    return labels, inputs, targets, token_weights(segments[: stage.scales]), stage.scales


@dataclass(frozen=True, kw_only=True)
class VARTraining(ImageTraining):
    """`train=var_tiny`; see `ImageTraining` for its settings."""

    kind: ClassVar[type[Model]] = VARModel
    tokenizer: VARTokenizerRecipe = field(default_factory=VARTokenizerRecipe)
    transformer: VARRecipe = field(default_factory=VARRecipe)

    def _train(self, model: VARModel, out: Path) -> None:
        images, labels = draw_classes(self.pool, self.seed, self.threads)
        vq = make_tokenizer(model.tokenizer, self.tokenizer.seed)
        self._fit_tokenizer(vq, images, [(side, side) for side in model.transformer.sides], out)
        latents = encode_images(vq.latents, images, torch.device(self.device), torch.float16)
        corpus = ClassCorpus(latents, labels, len(grammar.PAIRS))
        del images
        network = ClassToTokens(VAR(model.transformer))
        network.transformer.init_weights(generator(self.transformer.seed, 3))
        segments = model.transformer.segments
        draw = partial(draw_batch, corpus, vq.cpu(), segments, self.transformer)
        weights = self._fit_transformer(network, draw, out, partial(self.transformer.rate_by_cost, segments))
        write_weights(out / "transformer.safetensors", weights, self.transformer, "transformer")
