"""Training of the small class-conditional next-scale transformer on the tokenizer's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import Segment
from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import Stage, StagedRecipe, find_stage, token_weights
from kvbench.models.var.loop import make_features
from kvbench.models.var.tokenizer import VQVAE, shrink
from kvbench.models.var.transformer import VAR


@dataclass(frozen=True)
class VARRecipe(StagedRecipe):
    """Settings of the transformer's training; see `BaseTransformerRecipe` for the others.

    Attributes:
        class_dropout: share of samples with no class.
        wrong: highest share of a sample's tokens that are random, uniform on [0, wrong] for every second sample; later
            scales learn to correct them.
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
    """The transformer for training in one pass."""

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
    vq: VQVAE,
    latents: Tensor,
    segments: Sequence[Segment],
    scales: int,
    wrong: Tensor,
    rng: torch.Generator,
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
    """Draw the arguments of `ClassToTokens.forward` on the CPU, which depend on the step number alone.

    `segments` is the whole schedule of scales.
    """
    stage = find_stage(recipe.stages, step)
    rng = generator(recipe.seed, 1, step)
    index = torch.randint(len(corpus.latents), (stage.batch,), generator=rng)
    wrong = torch.rand(stage.batch, generator=rng) * recipe.wrong
    wrong = wrong * (torch.rand(stage.batch, generator=rng) < 0.5)
    latents = corpus.latents[index].float()
    targets, inputs = corrected_tokens(vq, latents, segments, stage.scales, wrong, rng)
    # The last row of the classes' embedding is for no class.
    dropped = torch.rand(stage.batch, generator=rng) < recipe.class_dropout
    labels = corpus.labels[index].masked_fill(dropped, corpus.classes)
    return labels, inputs, targets, token_weights(segments[: stage.scales]), stage.scales
