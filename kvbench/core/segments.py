"""Segments and model shapes, from which budgets, schedules and caches are computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

Family = Literal["next-scale", "next-token"]
"""A model makes an image in whole scales, each larger than the one before, or one token after the other."""


class Segment(NamedTuple):
    """Tokens that enter the cache together: a scale, an image row, a prompt or a decode chunk.

    Attributes:
        index: number of the segment, from 0.
        start: position of its first token.
        height: rows of tokens.
        width: tokens of a row.
        last: nothing attends to its tokens later, so that they are never cached.
        causal: a token sees those before it in the segment, and the tokens may come in several steps; otherwise all
            tokens come at once and see each other.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks a segment for
    start: int
    height: int
    width: int
    last: bool = False
    causal: bool = False

    @property
    def length(self) -> int:
        """Tokens in the segment (t_k)."""
        return self.height * self.width

    @property
    def end(self) -> int:
        """Position after the last token (c_k)."""
        return self.start + self.length


def next_scale(sizes: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Return the segments of a next-scale model, one per (height, width); nothing attends to the last one later.

    >>> [(segment.start, segment.length) for segment in next_scale([(1, 1), (2, 2), (3, 3)])]
    [(0, 1), (1, 4), (5, 9)]
    """
    segments: list[Segment] = []
    start = 0
    for index, (height, width) in enumerate(sizes):
        segments.append(Segment(index, start, height, width, last=index == len(sizes) - 1))
        start += height * width
    return tuple(segments)


def next_token(prompt: int, rows: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments of a next-token model: a prompt, then rows (or chunks) whose tokens come one at a time.

    Args:
        prompt: tokens of the prompt, at least 1.
        rows: tokens of each image row or decode chunk.
    """
    segments: list[Segment] = []
    start = 0
    for index, length in enumerate((prompt, *rows)):
        segments.append(Segment(index, start, 1, length, last=index == len(rows), causal=True))
        start += length
    return tuple(segments)


def next_token_image(prompt: int, tokens: int, chunk: int) -> tuple[Segment, ...]:
    """Return the segments of a model that draws so many tokens after a prompt, a method being asked after each chunk.

    The last token is drawn and never fed back, so that the last segment lacks it.

    >>> [segment.length for segment in next_token_image(5, 12, 4)]
    [5, 4, 4, 3]
    """
    whole, rest = divmod(tokens - 1, chunk)
    return next_token(prompt, [chunk] * whole + [rest] * (rest > 0))


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a model, which caches and methods need; no weights.

    Attributes:
        name: model name as in `conf/model`.
        layers: self-attention layers L.
        heads: KV heads per layer H.
        head_dim: channels per head D.
        segments: the generation schedule, K segments.
        branches: sequences per prompt (2 with classifier-free guidance).
        logit_scale: factor on q k^T (1 for Infinity, whose queries carry a learned scale).
        equal_branches: both branches of a prompt hold tokens of the same positions.
        first_head: number, in every layer of the whole model, of the first of these heads, of which other processes
            may have more.
        line: tokens of a row of the image, of a model that draws it token by token; 0 of scales and of texts.
        padding_counts: tokens in front of a short prompt that do not exist take of a row's share of the budget.
        group: query heads that share a KV head.
        rope_base: base of the rotary frequencies where tokens rotate with their position; 0 where they rotate with row
            and column, or not at all.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    segments: tuple[Segment, ...]
    branches: int = 2
    logit_scale: float = 1.0
    equal_branches: bool = True
    first_head: int = 0
    line: int = 0
    padding_counts: bool = True
    group: int = 1
    rope_base: float = 0.0

    def take_share(self, rank: int, count: int) -> "ModelSpec":
        """Return share `rank` of `count` equal shares of every layer's heads, which follow each other."""
        heads = self.heads // count
        return replace(self, heads=heads, first_head=rank * heads)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """t_k, tokens per segment."""
        return tuple(segment.length for segment in self.segments)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """c_k, tokens of segments 0..k together."""
        return tuple(segment.end for segment in self.segments)

    @property
    def family(self) -> Family:
        """Family of the model; causal segments are generated token by token."""
        return "next-token" if self.segments[-1].causal else "next-scale"

    @property
    def writes_text(self) -> bool:
        """Whether the model writes texts, whose words stand elsewhere in every prompt."""
        return self.family == "next-token" and not self.line

    @property
    def drawn_tokens(self) -> int:
        """Tokens of an image: those of all scales, or, after a prompt, those fed back and the last, which is not."""
        last = self.segments[-1].end
        return last if self.family == "next-scale" else last - self.segments[0].end + 1

    def leading_tokens(self, scales: int) -> int:
        """Tokens of the first so many scales, per head."""
        return self.ends[scales - 1] if scales else 0

    @property
    def all_heads(self) -> int:
        """T = layers x KV heads."""
        return self.layers * self.heads

    @property
    def cached_length(self) -> int:
        """c_{K-1} of the papers: tokens before the last segment, which is never cached."""
        return self.segments[-1].start

    @property
    def full_tokens(self) -> int:
        """Tokens of the full cache per sequence, T x c_{K-1}."""
        return self.all_heads * self.cached_length

    @property
    def full_bytes(self) -> int:
        """Bytes of the full cache per sequence, keys and values in 16 bits: what budgets in bytes are measured by."""
        return self.full_tokens * 2 * self.head_dim * 2
