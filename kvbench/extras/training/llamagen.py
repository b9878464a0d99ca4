"""Training of `llamagen_tiny`: scenes -> tokenizer -> tokens -> transformer and text encoder.

The tokenizer trains without a codebook first, then with a codebook from k-means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.extras.training.autoencoder import AutoencoderRecipe, Encode, encode_images, find_codes, start
from kvbench.extras.training.base import ImageTraining, write_weights
from kvbench.extras.training.images import draw_scenes
from kvbench.extras.training.loop import generator
from kvbench.extras.training.transformer import BaseTransformerRecipe, attend_causally, init_decoder
from kvbench.models.base import Model
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.llamagen.transformer import CaptionEmbedding, LlamaGen
from kvbench.models.parts.autoencoder import Size
from kvbench.models.parts.text import VocabularyEncoder
from kvbench.scenes import grammar

CODEBOOK_BATCHES = 32
"""Number of batches of images whose latents k-means clusters."""


@dataclass(frozen=True)
class VQRecipe(AutoencoderRecipe[VQ]):
    """Settings of the tokenizer's training; see `AutoencoderRecipe` for the other settings.

    Latents have unit length and gradients pass through codes to their latents (LlamaGen, arXiv:2406.06525, section 3.1;
    no adversarial and no perceptual loss).

    Attributes:
        free: number of first steps without a codebook, in which noise is added to latents.
        noise: standard deviation of this noise, per channel of a latent of unit length.
        commitment: weight of the distance from latents to their codes (LlamaGen section 3.1, beta).
    """

    free: int = 600
    noise: float = 0.05
    commitment: float = 0.25

    def _coders(self, network: VQ) -> tuple[Encode, Encode]:
        return network.latents, network.decode

    def _find_codebook(
        self, network: VQ, encode: Callable[[int], Tensor], _: Sequence[Size], rng: torch.Generator
    ) -> None:
        book = network.quantize.embedding.weight
        vectors = encode(CODEBOOK_BATCHES).movedim(1, -1).flatten(0, 2)
        book.data.copy_(find_codes(F.normalize(vectors, dim=-1).cpu(), len(book), rng, sphere=True))

    def _quantise(
        self, network: VQ, latents: Tensor, _: Sequence[Size], step: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor | float]:
        latents = F.normalize(latents, dim=1)
        if step < self.free:
            noise = torch.randn(latents.shape, generator=rng).to(latents.device)
            return F.normalize(latents + self.noise * noise, dim=1), 0.0
        nearest = network.codes(network.encode(latents.detach()))
        distance = (nearest - latents.detach()).square().sum(1).mean()
        distance = distance + self.commitment * (latents - nearest.detach()).square().sum(1).mean()
        return latents + (nearest - latents).detach(), distance


@dataclass(frozen=True)
class NextTokenRecipe(BaseTransformerRecipe):
    """Settings of the transformer's training; see `BaseTransformerRecipe` for the other settings.

    Attributes:
        steps: optimiser steps.
        batch: scenes per step.
        text_dropout: share of samples with the learned unconditional caption.
        wrong: maximum share of random tokens in a sample's inputs, so that the model tolerates wrong tokens; each
            sample's share is uniform on [0, wrong], or 0 for half of the samples.
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
            inputs: int64 [B, tokens]; the last token is not used.
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
    """Encoded scenes on the CPU: tokens int16 [N, tokens], word ids of their captions int64 [N, text_tokens]."""

    tokens: Tensor
    words: Tensor


def draw_batch(corpus: TokenCorpus, recipe: NextTokenRecipe, codes: int, step: int) -> tuple[Tensor, ...]:
    """Sample the arguments of `CaptionToTokens.forward`, which depend on the step alone.

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


@dataclass(frozen=True, kw_only=True)
class LlamaGenTraining(ImageTraining):
    """`train=llamagen_tiny`; see `ImageTraining` for its settings."""

    kind: ClassVar[type[Model]] = LlamaGenModel
    tokenizer: VQRecipe = field(default_factory=VQRecipe)
    transformer: NextTokenRecipe = field(default_factory=NextTokenRecipe)

    def _train(self, model: LlamaGenModel, out: Path) -> None:
        images, captions = draw_scenes(self.pool, self.seed, self.threads)
        vq = start(partial(VQ, model.tokenizer), self.tokenizer.seed)
        self._fit_tokenizer(vq, images, (), out)
        words = torch.tensor([grammar.VOCABULARY.tokenize_filled(caption) for caption in captions])
        corpus = TokenCorpus(encode(vq, images, torch.device(self.device)), words)
        del images
        network = CaptionToTokens(VocabularyEncoder(model.text_config), LlamaGen(model.transformer))
        network.init_weights(generator(self.transformer.seed, 3))
        draw = partial(draw_batch, corpus, self.transformer, model.transformer.vocabulary)
        weights = self._fit_transformer(network, draw, out)
        for part in ("transformer", "text"):
            write_weights(out / f"{part}.safetensors", weights, self.transformer, part)


def encode(vq: VQ, images: Tensor, device: torch.device) -> Tensor:
    """Return the tokens int16 [N, h w] of images uint8 [N, H, W, 3], both on the CPU."""
    latents = encode_images(vq.latents, images, device, torch.float32)
    return torch.cat([vq.encode(part.to(device)).flatten(1).short().cpu() for part in latents.split(256)])
