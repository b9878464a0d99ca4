"""Next-token loop of texts: the prompts in one step, then one token at a time until all texts have ended."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.noise import Noise
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.step_graph import open_steps
from kvbench.models.qwen3.sampling import TextSampling, draw_text_token

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
    rotation = transformer.rotations(segments[-1].end + 1)
    cache.reset(len(prompts), padding)
    # After tensors that live as long as the generation, which would otherwise be cut from the same block.
    reserve(activations, prompts.device)
    last = torch.tensor(list(ends), dtype=torch.int64, device=prompts.device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=prompts.device)
    x, drawn, done = prompts, list[Tensor](), False
    for segment in segments:
        cache.begin(segment)
        step = open_steps(transformer, cache, segment)
        sums = []
        for start in range(segment.start, segment.end, x.shape[1]):
            logits = step(x, rotation[start : start + x.shape[1]])
            sums.append(logits.sum(-1))
            drawn.append(torch.where(running, draw_text_token(logits, sampling, noise), pad))
            lengths += running
            running = running & ~torch.isin(drawn[-1], last)
            if done := len(drawn) % CHECK_INTERVAL == 0 and not running.any():
                break
            x = transformer.embed(drawn[-1])[:, None]
        # Once per segment, because the host waits for a GPU here; a sum is finite only if all its logits are.
        require_finite(torch.stack(sums, 1), segment.index)
        if done:
            break
    return DrawnTexts(torch.stack(drawn, 1), lengths, ~running)
