"""Training of the small next-token transformer on image tokens, text encoder included."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import BaseTransformerRecipe, attend_causally, init_decoder
from kvbench.models.llamagen.transformer import CaptionEmbedding, LlamaGen
from kvbench.models.parts.text import VocabularyEncoder


@dataclass(frozen=True)
class NextTokenRecipe(BaseTransformerRecipe):
    """Settings of the transformer's training; see `BaseTransformerRecipe` for the others.

    Attributes:
        steps: optimiser steps.
        batch: scenes per step.
        text_dropout: share of samples with the learned unconditional caption.
        wrong: highest share of a sample's input tokens that are random, uniform on [0, wrong] for every second sample,
            so that the model tolerates wrong tokens.
    """

    inner: ClassVar[tuple[str, ...]] = ("blocks.", "layers.", "cap_proj")
    steps: int = 4000
    batch: int = 64
    text_dropout: float = 0.1
    wrong: float = 0.1


class CaptionToTokens(nn.Module):
    """Text encoder and transformer as one module, for training in one pass."""

    def __init__(self, text: VocabularyEncoder, transformer: LlamaGen) -> None:
        super().__init__()
        self.text, self.transformer = text, transformer

    def forward(self, words: Tensor, dropped: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the tokens in nats, a scalar.

        Args:
            words: int64 [B, text_tokens] without padding.
            dropped: bool [B], samples with the unconditional caption.
            inputs: int64 [B, tokens]; the last one is not used.
            targets: int64 [B, tokens].
        """
        config, transformer = self.transformer.config, self.transformer
        embed = transformer.cls_embedding
        assert isinstance(embed, CaptionEmbedding)
        features = self.text(words)
        blank = embed.uncond_embedding.to(features.dtype).expand_as(features)
        condition = embed(torch.where(dropped[:, None, None], blank, features), guided=False)
        x = torch.cat((condition, transformer.tok_embeddings(inputs[:, :-1])), 1)
        rotation = config.rotations(config.condition + config.tokens)[:-1].to(x.device)
        hidden = transformer(x, rotation, attend_causally)[:, config.condition - 1 :]
        return F.cross_entropy(transformer.logits(hidden).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def init_weights(self, rng: torch.Generator) -> None:
        """Initialise weights for training: unit-variance layers, residual branches and logits that start at zero."""
        self.text.init_weights(rng)
        init_decoder(self.transformer, rng)


@dataclass(frozen=True)
class TokenCorpus:
    """Encoded scenes on the CPU: tokens int16 [N, tokens], words of their captions int64 [N, text_tokens]."""

    tokens: Tensor
    words: Tensor


def draw_batch(corpus: TokenCorpus, recipe: NextTokenRecipe, codes: int, step: int) -> tuple[Tensor, ...]:
    """Draw the arguments of `CaptionToTokens.forward`, which depend on the step number alone.

    `codes` is the size of the codebook.
    """
    rng = generator(recipe.seed, 1, step)
    index = torch.randint(len(corpus.tokens), (recipe.batch,), generator=rng)
    targets = corpus.tokens[index].long()
    share = torch.rand(recipe.batch, 1, generator=rng) * recipe.wrong
    share = share * (torch.rand(recipe.batch, 1, generator=rng) < 0.5)
    wrong = torch.rand(targets.shape, generator=rng) < share
    inputs = torch.where(wrong, torch.randint(codes, targets.shape, generator=rng), targets)
    dropped = torch.rand(recipe.batch, generator=rng) < recipe.text_dropout
    return corpus.words[index], dropped, inputs, targets
