"""Next-token models of few tokens: shapes, random tokens, generations in steps, and attention over what is kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.cache import KVCache
from kvbench.kernels.layout import RowOffsets
from tests.support.engine import D

PROMPT, ROWS = 6, (5, 5, 5, 4)
Tokens = list[tuple[Tensor, ...]]
"""(q, k, v) of every layer, all tokens of a generation."""


def shapes(prompt: int = PROMPT, rows: Sequence[int] = ROWS, heads: int = 3, branches: int = 1) -> ModelSpec:
    """A prompt and rows of so many tokens."""
    return ModelSpec("small", 2, heads, D, next_token(prompt, rows), branches, D**-0.5)


def draw(spec: ModelSpec, sequences: int, groups: int = 1, seed: int = 0) -> Tokens:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(sequences, spec.heads * fold, spec.segments[-1].end, D) for fold in (groups, 1, 1)]
    return [tuple(torch.randn(size, generator=generator) for size in sizes) for _ in range(spec.layers)]


def generate(
    cache: KVCache,
    inputs: Tokens,
    padding: Sequence[int] | None = None,
    size: int = 1,
    *,
    split: bool = False,
) -> list[Tensor]:
    """The outputs of every layer, `size` tokens at a time; the prompt at once unless it is to be split too."""
    found: list[list[Tensor]] = [[] for _ in inputs]
    cache.reset(len(inputs[0][0]), padding)
    for segment in cache.spec.segments:
        cache.begin(segment)
        step = size if segment.index or split else segment.length
        for start in range(segment.start, segment.end, step):
            stop = min(start + step, segment.end)
            for layer, qkv in enumerate(inputs):
                found[layer].append(cache.attend(layer, *(x[:, :, start:stop] for x in qkv)))
    return [torch.cat(parts, 2) for parts in found]


def masked(
    spec: ModelSpec, inputs: Tokens, padding: Sequence[int], seen: Tensor | None = None
) -> list[Tensor]:
    """Causal attention in double precision; `seen` bool [K, L, H, positions] masks each segment's past."""
    out, end = [], spec.segments[-1].end
    exists = torch.arange(end) >= torch.tensor(padding)[:, None, None, None]
    for layer, (q, k, v) in enumerate(inputs):
        fold = q.shape[1] // spec.heads
        k, v = (x.repeat_interleave(fold, 1).double() for x in (k, v))
        mask = torch.ones(end, end, dtype=torch.bool).tril().repeat(spec.heads, 1, 1)
        for at in spec.segments if seen is not None else ():
            mask[:, at.start : at.end, : at.start] &= seen[at.index, layer, :, None, : at.start]
        scores = (q.double() @ k.mT * spec.logit_scale).masked_fill(
            ~(mask.repeat_interleave(fold, 0) & exists), -torch.inf
        )
        out.append((scores.softmax(-1) @ v).float())
    return out


def agree(found: list[Tensor], expected: list[Tensor], padding: Sequence[int] = ()) -> None:
    """Outputs agree wherever a token exists, and are finite where none does."""
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        for sequence, behind in enumerate(padding or [0] * len(one)):
            parts = (x[sequence, :, behind:] for x in (one, other))
            torch.testing.assert_close(*parts, atol=2e-5, rtol=1e-4)


KERNEL = "kvbench.kernels.triton.decode_attention.decode_attention_triton"
"""Name of the kernel's launcher, for a patch."""


def decode(q: Tensor, k: Tensor, v: Tensor, rows: RowOffsets, scale: float) -> Tensor:
    """What `decode_attention_triton` computes: only the device knows where rows are, and what came before."""
    channels = q.shape[3]
    place = torch.arange(len(rows.keys) // channels)
    end = rows.lengths + rows.filled
    seen = place <= end[:, None]
    first = torch.arange(len(q))[:, None, None] * rows.stride  # of each sequence
    parts = []
    for storage, offsets, new in ((rows.keys, rows.key_offsets, k), (rows.values, rows.value_offsets, v)):
        slots = storage.view(-1, channels)
        start = first + offsets[:, None]
        slots.index_copy_(0, (start + end[:, None]).flatten(), new.flatten(0, 2).to(storage.dtype))
        every = (start + place).clamp(max=len(slots) - 1)
        found = slots.index_select(0, every.flatten()).view(*every.shape, channels)
        parts.append(found.masked_fill(~seen[..., None], 0).to(q.dtype))
    scores = (q @ parts[0].mT * scale).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ parts[1]
