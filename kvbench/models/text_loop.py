"""Next-token loop of texts: the prompts in one step, then one token at a time until all texts have ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.noise import Noise
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.text_sampling import TextSampling, draw_text_token
from kvbench.models.parts.token_steps import DrawnTokens, compute_next, hold_noise, run_step

CHECK_INTERVAL = 16
"""Tokens between two checks whether all texts have ended, in which the host waits for a GPU."""


class DrawnTexts(NamedTuple):
    """Tokens of a batch of texts.

    Attributes:
        tokens: int64 [prompts, longest text]; values after a text's end have no meaning.
        lengths: int64 [prompts], tokens of each text, its end included.
        ended: bool [prompts], whether the model ended the text.
    """

    tokens: Tensor
    lengths: Tensor
    ended: Tensor

    def rows(self) -> list[list[int]]:
        """Return each text's tokens on the host."""
        lengths = self.lengths.tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


@torch.inference_mode()
def draw_text_tokens(
    transformer: Decoder,
    prompts: Tensor,
    segments: Sequence[Segment],
    cache: Cache,
    noise: Noise,
    sampling: TextSampling,
    *,
    ends: Sequence[int],
    pad: int,
    padding: Sequence[int] | None = None,
    activations: int = 0,
) -> DrawnTexts:
    """Draw the tokens of a batch of texts.

    An ended text continues with `pad` until all texts or all segments have ended.

    Args:
        transformer: the model; its dtype decides the rounding.
        prompts: embedded, [prompts, tokens, width].
        segments: the prompt, then the tokens of the longest text except the last.
        cache: cache of keys and values.
        noise: randomness, per prompt.
        sampling: temperature and truncation.
        ends: tokens that end a text; without any, every text has the maximum length.
        pad: token that follows an end.
        padding: number of padding tokens in front of each prompt; None if all are equally long.
        activations: bytes for a layer's activations, which a GPU's allocator reserves as one block.

    Raises:
        NotFinite: logits are not finite.
    """
    rotation, first = transformer.rotations(segments[-1].end + 1), segments[0]
    cache.reset(len(prompts), padding)
    drawn = DrawnTokens.open(len(prompts), rotation[first.end - 1 : -1])
    running = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=prompts.device)
    last = torch.tensor(list(ends), dtype=torch.int64, device=prompts.device)
    texts = RunningTexts(drawn, running, lengths, last)
    if cache.repetitions is not None:
        texts = cache.repetitions.hold(texts)
    # After tensors that live as long as the generation, which would otherwise be cut from the same block.
    reserve(activations, prompts.device)
    with hold_noise(noise, cache.repetitions) as noise:
        cache.begin(first)
        logits = transformer.logits(transformer(prompts, rotation[: first.end], cache.attend)[:, -1])
        texts.draw(logits, sampling, pad, noise)
        require_finite(texts.drawn.sums[:, :1], first.index)
        step, count, done = partial(_step, transformer, cache, texts, sampling, pad), 1, False
        for segment in segments[1:]:
            cache.begin(segment)
            repeat, start = cache.open_steps(), count
            while not done and count < start + segment.length:
                run_step(repeat, None, step, noise, sampling.numbers, prompts.device)
                count += 1
                done = count % CHECK_INTERVAL == 0 and not texts.running.any()
            # Once per segment, because the host waits for a GPU here.
            require_finite(texts.drawn.sums[:, start:count], segment.index)
            if done:
                break
    return DrawnTexts(texts.drawn.tokens[:, :count].clone(), texts.lengths.clone(), ~texts.running)


@dataclass(frozen=True)
class RunningTexts:
    """Texts of a batch while they are drawn.

    Attributes:
        drawn: their tokens so far.
        running: bool [prompts], texts that have not ended.
        lengths: int64 [prompts], tokens of each text so far, its end included.
        ends: int64 [ends], tokens that end a text.
    """

    drawn: DrawnTokens
    running: Tensor
    lengths: Tensor
    ends: Tensor

    def draw(self, logits: Tensor, sampling: TextSampling, pad: int, noise: Noise) -> Tensor:
        """Draw the next token int64 [prompts] of each text, `pad` after its end, from logits [prompts, vocabulary]."""
        token = torch.where(self.running, draw_text_token(logits, sampling, noise), pad)
        self.lengths.add_(self.running)
        self.running.logical_and_(~torch.isin(token, self.ends))
        return self.drawn.add(token, logits.sum(-1))


def _step(
    transformer: Decoder, cache: Cache, texts: RunningTexts, sampling: TextSampling, pad: int, noise: Noise
) -> Tensor:
    return texts.draw(compute_next(transformer, cache, texts.drawn, 1), sampling, pad, noise)
