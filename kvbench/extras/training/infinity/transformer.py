"""Training of the tiny transformer on the tokenizer's bits, text encoder included."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import Segment
from kvbench.extras.training.infinity.bits import self_corrected_bits
from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import Stage, StagedRecipe, find_stage, token_weights
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.parts.text import VocabularyEncoder


@dataclass(frozen=True)
class TransformerRecipe(StagedRecipe):
    """Settings of the transformer's training; see `StagedRecipe` for the others.

    Attributes:
        text_dropout: share of samples with the learned unconditional text.
        input_dropout: share of (sample, scale) pairs with zero features, whose content must come from the keys and
            values of earlier scales.
        flip: highest flip probability, uniform on [0, flip] for three samples of four.
    """

    stages: tuple[Stage, ...] = (Stage(3, 128, 1200), Stage(6, 64, 5600), Stage(9, 32, 1000))
    text_dropout: float = 0.1
    input_dropout: float = 0.1
    flip: float = 0.25


@dataclass(frozen=True)
class Corpus:
    """Encoded images on the CPU: latents float16 [N, d, H, W], tokens int64 [N, words] (0 for padding), amplitudes."""

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
    """Draw the arguments of `TextToBits.forward` on the CPU, which depend on the step number alone.

    `segments` is the whole schedule of scales.
    """
    stage = find_stage(recipe.stages, step)
    rng = generator(recipe.seed, 1, step)
    segments = segments[: stage.scales]
    index = torch.randint(len(corpus.latents), (stage.batch,), generator=rng)
    flip = torch.rand(stage.batch, generator=rng) * recipe.flip
    flip = flip * (torch.rand(stage.batch, generator=rng) < 0.75)
    targets, inputs = self_corrected_bits(
        corpus.latents[index].float(),
        [(s.height, s.width) for s in segments],
        corpus.amplitudes,
        flip,
        rng,
    )
    blank = torch.rand(stage.batch, len(segments), generator=rng) < recipe.input_dropout
    lengths = torch.tensor([s.length for s in segments[1:]])
    inputs = inputs * ~blank[:, 1:].repeat_interleave(lengths, 1)[..., None]
    dropped = torch.rand(stage.batch, generator=rng) < recipe.text_dropout
    return corpus.tokens[index], dropped, inputs, targets, token_weights(segments), segments
