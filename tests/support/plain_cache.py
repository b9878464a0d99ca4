"""A cache as lists: what each head of one layer and sequence holds, token by token in double precision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment, next_token
from kvbench.engine.cache import KVCache
from kvbench.kernels.layout import pad_rows
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from tests.support.engine import D, run, small, tokens_of

HEADS, GROUP, LAYERS, BASE = 2, 2, 2, 100.0
TEXT = ModelSpec(
    "text", LAYERS, HEADS, D, next_token(14, [6, 5, 4]), 1, D**-0.5,
    padding_counts=False, group=GROUP, rope_base=BASE,
)  # fmt: skip
"""A prompt of at most 14 tokens, and three segments of tokens."""
PADDING = (0, 3, 6)
MAPS = replace(small(LAYERS, HEADS, (1, 2, 3, 4, 5), 0.6), branches=1, group=GROUP)
"""Maps of 1 to 25 tokens, whose tokens see each other."""


@dataclass
class Head:
    """Slots of a head: positions, keys and values float64 [slots, D], and one number of the method for each."""

    tokens: list[int] = field(default_factory=list)
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, D).double())
    values: Tensor = field(default_factory=lambda: torch.zeros(0, D).double())
    numbers: list[float] = field(default_factory=list)

    def take(self, slots: Sequence[int]) -> "Head":
        """The head with some of its slots."""
        tokens, numbers = ([x[i] for i in slots] for x in (self.tokens, self.numbers))
        return Head(tokens, self.keys[list(slots)], self.values[list(slots)], numbers)


@dataclass
class Moment:
    """A layer of one sequence right after a segment, which is the last part of every head.

    Attributes:
        begin: position of the first token, after the padding.
        asking: positions of the segment's tokens.
        queries: [heads, query heads of each, tokens of the segment, D].
        room: slots that each head may keep.
        memory: what a method remembers of the layer, at first nothing.
    """

    spec: ModelSpec
    layer: int
    sequence: int
    segment: Segment
    begin: int
    asking: list[int]
    queries: Tensor
    heads: list[Head]
    room: list[int]
    rotation: Tensor | None
    projection: Tensor
    memory: dict[str, Any]

    def logits(self, head: int) -> Tensor:
        """Scores [query heads, tokens, slots] of a head; -inf for tokens that a query does not see."""
        held = self.heads[head]
        scores = self.queries[head] @ held.keys.T * self.spec.logit_scale
        if self.segment.causal:
            for number, query in enumerate(self.asking):
                later = [slot for slot, token in enumerate(held.tokens) if token > query]
                scores[:, number, later] = -torch.inf
        return scores

    def attention(self, head: int) -> Tensor:
        """Probabilities of a head, shaped like `logits`."""
        return self.logits(head).softmax(-1)

    def unrotate(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Keys or queries [..., tokens, D] before the rotation: all even channels, then all odd ones."""
        if self.rotation is None:
            return x
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        before = pairs * self.rotation[list(positions)].conj().to(pairs.dtype)
        return torch.cat((before.real, before.imag), -1)


Rule = Callable[[Moment], list[list[int]]]
"""Returns the slots that each head keeps; may change the contents of slots."""


@dataclass(frozen=True)
class Case:
    """A method, and the rule that it should follow.

    Attributes:
        room: tokens that each head of each layer may hold, [layers][heads].
        artifact: calibration of the method.
    """

    method: Method
    rule: Rule
    room: tuple[tuple[int, int], ...] = ((7, 6), (6, 6))
    artifact: Artifact | None = None


def best(scores: Sequence[float], room: int) -> list[int]:
    """The highest scores, the earlier of equals, in order of their places."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:room])


def check(case: Case, spec: ModelSpec, padding: Sequence[int], *, rotated: bool = True) -> None:
    """Compare positions, keys and values of the cache with the rule's after every segment, row by row."""
    inputs = tokens_of(spec, len(padding), seed=5, groups=GROUP)
    generator = torch.Generator().manual_seed(1)
    projection = torch.randn(LAYERS, 12, HEADS * GROUP * D, generator=generator)
    angles = torch.arange(spec.segments[-1].end + 1)[:, None] * BASE ** (-2 * torch.arange(D // 2) / D)
    rotation = torch.polar(torch.ones_like(angles), angles) if rotated else None
    tokens = sum(map(sum, case.room))
    case.method.prepare(spec, Budget(Fraction(tokens), spec.full_tokens, spec.all_heads), case.artifact)
    cache = KVCache(
        spec, case.method, dtype=torch.float32, projection=projection.__getitem__, rotation=rotation
    )
    cache.prompts = range(len(padding))
    seen = _watch(cache)
    run(cache, inputs, list(padding) if any(padding) else None)
    dropped = False
    for layer in range(spec.layers):
        for sequence, begin in enumerate(padding):
            heads, memory = [Head() for _ in range(HEADS)], dict[str, Any]()
            for segment in spec.segments[:-1]:
                q, k, v = (x[sequence].double() for x in inputs[segment.index][layer])
                first = 0 if segment.index else begin
                asking = list(range(segment.start + first, segment.end))
                for head, (key, value) in enumerate(zip(k[:, first:], v[:, first:], strict=True)):
                    held = heads[head]
                    heads[head] = Head(
                        held.tokens + asking, torch.cat((held.keys, key)), torch.cat((held.values, value)),
                        held.numbers + [0.0] * len(asking),
                    )  # fmt: skip
                queries = q[:, first:].unflatten(0, (HEADS, GROUP))
                moment = Moment(
                    spec, layer, sequence, segment, begin, asking, queries, heads, list(case.room[layer]),
                    rotation, projection[layer].double(), memory,
                )  # fmt: skip
                kept = case.rule(moment)
                dropped |= any(len(slots) < len(head.tokens) for slots, head in zip(kept, heads, strict=True))
                heads = [head.take(slots) for slots, head in zip(kept, heads, strict=True)]
                for head, held in enumerate(heads):
                    positions, keys, values = seen[segment.index, layer, sequence, head]
                    assert positions == held.tokens, (segment.index, layer, sequence, head)
                    torch.testing.assert_close(keys.double(), held.keys, rtol=1e-4, atol=1e-4)
                    torch.testing.assert_close(values.double(), held.values, rtol=1e-4, atol=1e-4)
    assert dropped


Seen = dict[tuple[int, int, int, int], tuple[list[int], Tensor, Tensor]]


def _watch(cache: KVCache) -> Seen:
    """Fills with positions, keys and values by segment, layer, sequence and head while the cache is used."""
    seen: Seen = {}
    attend = cache.attend

    def attend_and_look(layer: int, q: Tensor, *kv: Tensor) -> Tensor:
        out, index = attend(layer, q, *kv), cache._segment.index
        store = cache._stores[layer]
        rows = store.layout.positions.tolist()
        keys, values = (pad_rows(x, store.layout).flatten(0, 1) for x in (store.keys, store.values))
        for row in range(len(q) * HEADS):
            positions = [token for token in rows[row % len(rows)] if token >= 0]
            count = len(positions)
            seen[index, layer, *divmod(row, HEADS)] = (
                positions,
                keys[row, :count].clone(),
                values[row, :count].clone(),
            )
        return out

    cache.attend = attend_and_look  # type: ignore[method-assign]
    return seen
