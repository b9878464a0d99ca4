"""The next-token loop of text: prompts at once, then one token after the other until every text has ended."""

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
from kvbench.models.qwen3.sampling import TextSampling, draw

LOOKS = 16
"""Tokens between two looks at whether all texts have ended: each makes the host wait for a GPU."""


class Drawn(NamedTuple):
    """Tokens of a batch of texts.

    Attributes:
        tokens: int64 [prompts, most tokens]; what follows a text's end means nothing.
        lengths: int64 [prompts], tokens of each text, the one that ends it included.
        ended: bool [prompts], whether a text came to its end.
    """

    tokens: Tensor
    lengths: Tensor
    ended: Tensor

    def rows(self) -> list[list[int]]:
        """Return each text's tokens, on the host."""
        lengths = self.lengths.tolist()
        return [row[:length] for row, length in zip(self.tokens.tolist(), lengths, strict=True)]


@torch.inference_mode()
def generate(
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
) -> Drawn:
    """Draw the tokens of a batch of texts.

    A text that has ended goes on with `pad`, beside the others, until all have ended or the segments have.

    Args:
        transformer: the model; its dtype decides the rounding.
        prompts: embedded, [prompts, tokens, width].
        segments: the prompt, then the tokens that may follow it, but for the last.
        cache: holds keys and values.
        noise: randomness, per prompt.
        sampling: temperature and truncation.
        ends: tokens that end a text; none, and each goes on as long as it may.
        pad: token that follows an end.
        padding: tokens in front of each prompt that do not exist; None where all are equally long.
        activations: bytes that a GPU's allocator takes as one piece beforehand, for what a layer works on.

    Raises:
        NotFinite: logits are not finite.
    """
    rotation = transformer.rotations(segments[-1].end + 1)
    cache.reset(len(prompts), padding)
    # After what lives as long as the generation, which would else be cut from the same piece.
    reserve(activations, prompts.device)
    last = torch.tensor(list(ends), dtype=torch.int64, device=prompts.device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=prompts.device)
    x, drawn, over = prompts, list[Tensor](), False
    for segment in segments:
        cache.begin(segment)
        step = open_steps(transformer, cache, segment)
        sums = []
        for start in range(segment.start, segment.end, x.shape[1]):
            logits = step(x, rotation[start : start + x.shape[1]])
            sums.append(logits.sum(-1))
            drawn.append(torch.where(running, draw(logits, sampling, noise), pad))
            lengths += running
            running = running & ~torch.isin(drawn[-1], last)
            if over := len(drawn) % LOOKS == 0 and not running.any():
                break
            x = transformer.embed(drawn[-1])[:, None]
        # Once per segment, since the host waits for a GPU here; a sum is finite only if all its logits are.
        require_finite(torch.stack(sums, 1), segment.index)
        if over:
            break
    return Drawn(torch.stack(drawn, 1), lengths, ~running)
