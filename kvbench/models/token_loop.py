"""Loops of next-token models: generation by a head, one token per step, and passes over given tokens.

Heads sample the tokens of images, or of texts, which may end at different steps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.noise import Noise, draw_ahead
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.sampling import TokenSampling, draw_token, guide
from kvbench.models.parts.text_sampling import TextSampling, draw_text_token
from kvbench.models.parts.token_steps import DrawnTokens, hold_noise, run_step

S = TypeVar("S", bound=DrawnTokens)

CHECK_INTERVAL = 16
"""Tokens between checks for the end of all texts; each check synchronises with a GPU."""


class Head(ABC, Generic[S]):
    """Sampler of tokens from logits; S is the state of a batch.

    Attributes:
        branches: sequences per prompt.
        numbers: random numbers per prompt and sampled token; None for one per channel of the logits.
    """

    branches: int = 1
    numbers: int | None = None

    @abstractmethod
    def begin(self, drawn: DrawnTokens) -> S:
        """Return the state of a batch before its first token is sampled."""

    @abstractmethod
    def draw(self, drawn: S, logits: Tensor, index: int, noise: Noise, *inputs: Tensor) -> Tensor:
        """Sample the next token int64 [B] of each prompt, and add it to `drawn`.

        Args:
            drawn: tokens sampled so far.
            logits: float32 [branches x B, V], conditional rows first.
            index: index of the token, from 0.
            noise: randomness, per prompt.
            inputs: results of `list_inputs`.
        """

    def find_key(self, index: int) -> Hashable:
        """Return a key of what distinguishes a token's step apart from its inputs; None if nothing does."""
        return None

    def list_inputs(self, index: int) -> list[Tensor]:
        """Return further tensors that sampling a token reads."""
        return []

    def has_ended(self, drawn: S, count: int) -> bool:
        """Return whether generation can stop after `count` tokens per prompt."""
        return False


@torch.inference_mode()
def draw_tokens(
    transformer: Decoder,
    prompts: Tensor,
    segments: Sequence[Segment],
    cache: Cache,
    noise: Noise,
    head: Head[S],
    *,
    padding: Sequence[int] | None = None,
    activations: int = 0,
) -> S:
    """Generate the tokens of a batch of texts or images, and return a copy of the state with them.

    Args:
        transformer: the model; its dtype decides the rounding.
        prompts: embedded prompts [sequences, tokens, width]; with guidance conditional sequences come first.
        segments: schedule of the prompts, then of the longest output's tokens except the last.
        cache: cache of keys and values.
        noise: randomness, per prompt.
        head: samples each token.
        padding: number of padding tokens in front of each prompt; None if all are equally long.
        activations: bytes for a layer's activations, which a GPU's allocator reserves as one block.

    Raises:
        NotFinite: logits are not finite.
    """
    rotation, first, device = transformer.rotations(segments[-1].end + 1), segments[0], prompts.device
    cache.reset(len(prompts), padding)
    outputs = len(prompts) // head.branches
    drawn = head.begin(DrawnTokens.open(outputs, rotation[first.end - 1 : -1]))
    if cache.repetitions is not None:
        drawn = cache.repetitions.hold(drawn)
    # After long-lived tensors are allocated, which would otherwise lie inside the reserved block.
    reserve(activations, device)
    numbers = transformer.config.choices if head.numbers is None else head.numbers
    with (
        hold_noise(noise, cache.repetitions) as noise,
        draw_ahead(noise, outputs, numbers, len(drawn.rotation), device) as noise,
    ):
        cache.begin(first)
        logits = transformer.logits(transformer(prompts, rotation[: first.end], cache.attend)[:, -1])
        head.draw(drawn, logits, 0, noise, *head.list_inputs(0))
        require_finite(drawn.sums[:, :1], first.index)
        count, ended = 1, False
        for segment in segments[1:]:
            cache.begin(segment)
            repeat, start = cache.open_steps(), count
            while not ended and count < start + segment.length:
                step = partial(_step, transformer, cache, head, drawn, count)
                run_step(repeat, head.find_key(count), step, noise, numbers, device, *head.list_inputs(count))
                count += 1
                ended = head.has_ended(drawn, count)
            # Once per segment, because the host waits for a GPU here.
            require_finite(drawn.sums[:, start:count], segment.index)
            if ended:
                break
    return drawn.copy()


def _step(
    transformer: Decoder, cache: Cache, head: Head[S], drawn: S, index: int, noise: Noise, *inputs: Tensor
) -> Tensor:
    x = transformer.embed(drawn.last).repeat(head.branches, 1)[:, None]
    rotation = drawn.rotation.index_select(0, drawn.count)
    logits = transformer.logits(transformer(x, rotation, cache.attend)[:, -1])
    return head.draw(drawn, logits, index, noise, *inputs)


@torch.inference_mode()
def read_tokens(
    transformer: Decoder,
    embed: Callable[[int, int], Tensor],
    length: int,
    segments: Sequence[Segment],
    cache: Cache,
    padding: Sequence[int] | None,
    first: int,
) -> Tensor:
    """Run the model over given tokens; return the states from position `first` on, [sequences, length - first, width].

    Args:
        transformer: the model; its dtype decides the rounding.
        embed: returns the embedded tokens [sequences, end - start, width] of positions from start to end.
        length: number of tokens; later segments are left out, and the last one may be incomplete.
        segments: schedule; the tokens of a segment are one step.
        cache: cache of keys and values.
        padding: number of padding tokens in front of each sequence; None if there are none.
        first: position of the first token whose state is returned.

    Raises:
        NotFinite: states are not finite.
    """
    rotation, states = transformer.rotations(length), []
    x = embed(0, segments[0].end)
    cache.reset(len(x), padding if any(padding or ()) else None)
    for segment in segments:
        start, end = segment.start, min(segment.end, length)
        if start >= end:
            break
        cache.begin(segment)
        x = transformer(embed(start, end) if start else x, rotation[start:end], cache.attend)
        if end > first:
            states.append(x[:, max(first - start, 0) :])
            require_finite(states[-1], segment.index)
    return torch.cat(states, 1)


class ImageHead(Head[DrawnTokens]):
    """Sampler of the tokens of images, in row-major order.

    Args:
        sampling: guidance and truncation.
        forbidden: returns the codes that an image token cannot be, bool [codes], by the token's index; None if every
            code is allowed. Noise is drawn for all codes.
    """

    def __init__(self, sampling: TokenSampling, forbidden: Callable[[int], Tensor] | None = None) -> None:
        self.branches = sampling.branches
        self._sampling, self._forbidden = sampling, forbidden

    def begin(self, drawn: DrawnTokens) -> DrawnTokens:
        """Return `drawn`, because images need no other state."""
        return drawn

    def find_key(self, index: int) -> bool:
        """Return whether a token is guided, which changes its step."""
        return self._sampling.guides(index)

    def list_inputs(self, index: int) -> list[Tensor]:
        """Return the mask of forbidden codes, if there are any."""
        return [] if self._forbidden is None else [self._forbidden(index)]

    def draw(self, drawn: DrawnTokens, logits: Tensor, index: int, noise: Noise, *inputs: Tensor) -> Tensor:
        """Sample the next token int64 [B] of each image."""
        logits = guide(logits, self._sampling, index)
        sums = logits.sum(-1)
        for mask in inputs:
            logits = logits.masked_fill(mask, -math.inf)
        return drawn.add(draw_token(logits, self._sampling, noise), sums)


@dataclass(frozen=True)
class DrawnTexts(DrawnTokens):
    """Tokens of a batch of texts; entries after a text's end are undefined.

    Attributes:
        running: bool [prompts], texts that have not ended.
        lengths: int64 [prompts], tokens of each text so far, its end included.
        ends: int64 [ends], tokens that end a text.
    """

    running: Tensor
    lengths: Tensor
    ends: Tensor

    def rows(self) -> list[list[int]]:
        """Return the tokens of each text up to its end, end token included, as lists on the host."""
        lengths = self.lengths.tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


class TextHead(Head[DrawnTexts]):
    """Sampler of the tokens of texts; an ended text continues with `pad` until all texts or all segments have ended.

    Args:
        sampling: temperature and truncation.
        ends: tokens that end a text; if empty, every text has the maximum length.
        pad: token that follows an end.
    """

    def __init__(self, sampling: TextSampling, ends: Sequence[int], pad: int) -> None:
        self.numbers = sampling.numbers
        self._sampling, self._ends, self._pad = sampling, list(ends), pad

    def begin(self, drawn: DrawnTokens) -> DrawnTexts:
        """Return the state of a batch of texts, none of which has ended."""
        running = torch.ones_like(drawn.last, dtype=torch.bool)
        ends = torch.tensor(self._ends, dtype=torch.int64, device=drawn.last.device)
        return DrawnTexts(**vars(drawn), running=running, lengths=torch.zeros_like(drawn.last), ends=ends)

    def draw(self, drawn: DrawnTexts, logits: Tensor, index: int, noise: Noise, *inputs: Tensor) -> Tensor:
        """Sample the next token int64 [B] of each text, `pad` after its end."""
        token = torch.where(drawn.running, draw_text_token(logits, self._sampling, noise), self._pad)
        drawn.lengths.add_(drawn.running)
        drawn.running.logical_and_(~torch.isin(token, drawn.ends))
        return drawn.add(token, logits.sum(-1))

    def has_ended(self, drawn: DrawnTexts, count: int) -> bool:
        """Return whether all texts have ended, checked every `CHECK_INTERVAL` tokens; False between checks."""
        return count % CHECK_INTERVAL == 0 and not drawn.running.any()
