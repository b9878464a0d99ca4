"""Segments and model shapes: the inputs of budgets, schedules and caches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

Family = Literal["next-scale", "next-token"]
"""Generation scale by scale, or token by token."""
MAX_HEADS, MAX_TOKENS = 2**17, 2**24
"""Maximum number of KV heads over all layers, and of tokens of a sequence."""


class Segment(NamedTuple):
    """Tokens that enter the cache together: a scale, an image row, a prompt or a decode chunk.

    Attributes:
        index: index of the segment in the schedule, from 0.
        start: position of its first token.
        height: rows of tokens.
        width: tokens per row.
        last: no later segment attends to its tokens, so they are never cached.
        causal: a token sees earlier tokens of the segment, and tokens may arrive in several steps; otherwise all
            tokens arrive in one step and see each other.
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index
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
    """Return the segments of a next-scale model, one per (height, width).

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
    """Return the segments of a next-token model: `prompt` >= 1 tokens, then rows (or chunks) of single tokens."""
    segments: list[Segment] = []
    start = 0
    for index, length in enumerate((prompt, *rows)):
        segments.append(Segment(index, start, 1, length, last=index == len(rows), causal=True))
        start += length
    return tuple(segments)


def next_token_image(prompt: int, tokens: int, chunk: int) -> tuple[Segment, ...]:
    """Return the segments of a model that generates `tokens` tokens after a prompt, in chunks.

    The last token is never fed back, so the last segment lacks it.

    >>> [segment.length for segment in next_token_image(5, 12, 4)]
    [5, 4, 4, 3]
    """
    whole, rest = divmod(tokens - 1, chunk)
    return next_token(prompt, [chunk] * whole + [rest] * (rest > 0))


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a model, without weights.

    Attributes:
        name: model name as in `conf/model`.
        layers: self-attention layers L.
        heads: KV heads per layer H.
        head_dim: channels per head D.
        segments: the generation schedule, K segments.
        branches: sequences per prompt (2 with classifier-free guidance).
        logit_scale: factor on q k^T (1 for Infinity, whose queries carry a learned scale).
        equal_branches: both branches of a prompt hold tokens of the same positions.
        first_head: index of the first head in the whole model's layer; other processes may hold more heads.
        line: tokens of an image row in next-token models; 0 for scales and texts.
        padding_counts: padding in front of a short prompt counts as held.
        group: query heads that share a KV head.
        rope_base: base of the rotary frequencies of 1D RoPE; 0 for 2D RoPE or none.
        rope_frequencies: rotary frequency of each pair of channels, radians per position; empty if they are the D/2
            frequencies of `rope_base`.
        unrotated: indices of layers without RoPE.
        origin: RoPE position of the first token; above 0 if padding that all prompts have is cut off.
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
    rope_frequencies: tuple[float, ...] = ()
    unrotated: tuple[int, ...] = ()
    origin: int = 0

    def __post_init__(self) -> None:
        for what, count, most in (
            ("heads of keys and values", self.layers * self.heads, MAX_HEADS),
            ("tokens", self.segments[-1].end, MAX_TOKENS),
        ):
            if count > most:
                raise ValueError(
                    f"model={self.name}: its shape has {count} {what}, at most {most} are possible"
                )

    def with_prompt(self, tokens: int) -> "ModelSpec":
        """Return the shapes for prompts of `tokens` tokens, in the first segment.

        `origin` moves by the padding that is cut off in front.
        """
        if tokens == self.segments[0].length:
            return self
        prompt, *others = self.segments
        shift = tokens - prompt.length
        moved = (segment._replace(start=segment.start + shift) for segment in others)
        segments = (prompt._replace(width=tokens), *moved)
        return replace(self, segments=segments, origin=self.origin - shift)

    def take_share(self, rank: int, count: int) -> "ModelSpec":
        """Return share `rank` of `count` equal shares of consecutive heads in every layer."""
        heads = self.heads // count
        return replace(self, heads=heads, first_head=rank * heads)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """t_k, tokens per segment."""
        return tuple(segment.length for segment in self.segments)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """c_k, tokens of segments 0..k."""
        return tuple(segment.end for segment in self.segments)

    @property
    def family(self) -> Family:
        """Family of the model; causal segments are generated token by token."""
        return "next-token" if self.segments[-1].causal else "next-scale"

    @property
    def writes_text(self) -> bool:
        """Whether the model generates texts, in which positions have no common meaning across prompts."""
        return self.family == "next-token" and not self.line

    @property
    def drawn_tokens(self) -> int:
        """Generated tokens: all scales, or all tokens after the prompt, with the last one, which is not fed back."""
        last = self.segments[-1].end
        return last if self.family == "next-scale" else last - self.segments[0].end + 1

    def leading_tokens(self, scales: int) -> int:
        """Return the tokens of the first `scales` segments, per head."""
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
        """Bytes of the full cache per sequence in 16 bits, the base of byte budgets."""
        return self.full_tokens * 2 * self.head_dim * 2
