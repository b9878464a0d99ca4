"""What tests of the cache and of methods share: small models, random tokens, a run, dense attention, what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.cache import KVCache
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.view import View
from kvbench.runs.calibrate import Observation

D = 8


def small(
    layers: int = 2, heads: int = 3, sides: tuple[int, ...] = (1, 2, 3, 4), scale: float = 1.0
) -> ModelSpec:
    return ModelSpec(
        "small", layers, heads, D, next_scale([(side, side) for side in sides]), logit_scale=scale
    )


def prepared(
    method: Method, spec: ModelSpec, budget: float | str = 1, artifact: Artifact | None = None
) -> Method:
    method.prepare(spec, Budget.parse(budget, spec), artifact)
    return method


def tokens_of(
    spec: ModelSpec, sequences: int, seed: int = 0, groups: int = 1
) -> list[list[tuple[Tensor, ...]]]:
    """Random (q, k, v) per segment and layer."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            tuple(
                torch.randn(sequences, spec.heads * fold, segment.length, D, generator=generator)
                for fold in (groups, 1, 1)
            )
            for _ in range(spec.layers)
        ]
        for segment in spec.segments
    ]


def shown_to(observer: Observer, spec: ModelSpec) -> Method:
    """A method that shows each layer to an observer, which is prepared here."""
    observer.prepare(spec)
    return Observation([observer], spec)


def open_cache(
    method: Method | Observer,
    spec: ModelSpec,
    budget: float | str = 1,
    artifact: Artifact | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> KVCache:
    """A cache of a method, or of an observer, that is prepared here."""
    shown = isinstance(method, Observer)
    ready = shown_to(method, spec) if shown else prepared(method, spec, budget, artifact)
    return KVCache(spec, ready, dtype=dtype, **options)


def run(
    cache: KVCache, inputs: Sequence[Sequence[tuple[Tensor, ...]]], padding: Sequence[int] | None = None
) -> list[Tensor]:
    """Feed each segment at once, inputs [segment][layer]; outputs of every segment and layer."""
    cache.reset(len(inputs[0][0][0]), padding)
    out = []
    for segment, layers in zip(cache.spec.segments, inputs, strict=True):
        cache.begin(segment)
        out += [cache.attend(layer, *qkv) for layer, qkv in enumerate(layers)]
    return out


def dense(
    spec: ModelSpec, inputs: Sequence[Sequence[tuple[Tensor, ...]]], seen: Tensor | None = None
) -> list[Tensor]:
    """Softmax attention over everything so far; `seen` bool [K, L, H, positions] masks each past."""
    out = []
    for segment, layers in zip(spec.segments, inputs, strict=True):
        for layer, (q, _, _) in enumerate(layers):
            k, v = (torch.cat([inputs[i][layer][n] for i in range(segment.index + 1)], 2) for n in (1, 2))
            fold = q.shape[1] // spec.heads
            k, v = (x.repeat_interleave(fold, 1).double() for x in (k, v))
            scores = q.double() @ k.transpose(2, 3) * spec.logit_scale
            if seen is not None:
                mask = seen[segment.index, layer, :, : segment.end].repeat_interleave(fold, 0)
                scores = scores.masked_fill(~mask[None, :, None], -torch.inf)
            out.append((scores.softmax(-1) @ v).float())
    return out


@dataclass
class Drawn(Method):
    """Keeps what a table says: bool [K, L, H, positions], what is still there when a segment starts."""

    seen: Tensor

    static: ClassVar[bool] = True

    def keep(self, view: View) -> Tensor:
        """Slots that the next segment sees."""
        table = self.seen[view.segment.index + 1, view.layer]
        return table.gather(1, view.position.clamp(min=0))


@dataclass
class DrawnPerSequence(Drawn):
    """The same through the path of methods that look at data."""

    static: ClassVar[bool] = False

    def keep(self, view: View) -> Tensor:
        """Slots that the next segment sees."""
        table = self.seen[view.segment.index + 1, view.layer].repeat(view.sequences, 1)
        return table.gather(1, view.position.clamp(min=0))


def draw_seen(spec: ModelSpec, seed: int, share: float) -> Tensor:
    """What is dropped never comes back; a segment always sees all of itself."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.ones(len(spec.segments), spec.layers, spec.heads, spec.segments[-1].end, dtype=torch.bool)
    for segment in spec.segments[1:]:
        kept = torch.rand(spec.layers, spec.heads, segment.start, generator=generator) < share
        seen[segment.index, ..., : segment.start] = seen[segment.index - 1, ..., : segment.start] & kept
    return seen


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


class Asked(NamedTuple):
    """One answer of a method: slots shown and kept, [rows, slots]."""

    layer: int
    scale: int
    position: Tensor
    kept: Tensor

    def ids(self, rows: slice = slice(None)) -> list[list[int]]:
        """Positions kept, per row."""
        return [row[kept].tolist() for row, kept in zip(self.position[rows], self.kept[rows], strict=True)]


def listening(method: Method) -> list[Asked]:
    """Fills, while the method is used, with what it answers."""
    seen: list[Asked] = []
    inner = method.keep

    def keep(view: View) -> Tensor | None:
        kept = inner(view)
        exists = view.position >= 0
        shown = exists if kept is None else kept & exists
        seen.append(Asked(view.layer, view.segment.index, view.position.clone(), shown))
        return kept

    method.keep = keep
    return seen


class Watched(NamedTuple):
    """A generation: its cache, what the method answered, and the outputs."""

    cache: KVCache
    asked: list[Asked]
    out: list[Tensor]


def watch(
    method: Method,
    spec: ModelSpec,
    inputs: Sequence[Sequence[tuple[Tensor, ...]]],
    budget: float | str = 1,
    artifact: Artifact | None = None,
    padding: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    **options: Any,
) -> Watched:
    """One generation by a method that is prepared here; `prompts` are the numbers of its prompts if not from 0."""
    cache = open_cache(method, spec, budget, artifact, **options)
    cache.prompts = prompts
    asked = listening(method)
    return Watched(cache, asked, run(cache, inputs, padding))


def note_calls(method: Any, hook: str) -> list[tuple[View, Any]]:
    """Fills, while the method is used, with the view and the result of each call of a hook."""
    calls: list[tuple[View, Any]] = []
    inner = getattr(method, hook)

    def call(view: View, *others: Any) -> Any:
        calls.append((view, inner(view, *others)))
        return calls[-1][1]

    setattr(method, hook, call)
    return calls


def same_best(kept: Sequence[int], expected: Sequence[int], scores: Tensor) -> None:
    """Assert that two choices of slots, in any order, are equal up to slots of equal score; scores [slots]."""
    assert len(set(kept)) == len(kept) == len(set(expected)) == len(expected)
    found, wanted = (scores[list(slots)].sort().values for slots in (kept, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def receive(
    q: Tensor, k: Tensor, held: Sequence[int], queries: Sequence[int], attention: str, scale: float
) -> dict[int, float]:
    """Return the mean that each held token receives from the tokens in `queries`, token by token; 0 from earlier ones.

    `q` [query heads that share the keys, positions, D] and `k` [positions, D] give probabilities (`prob`) or logits.
    """
    sums = dict.fromkeys(held, 0.0)
    for head in q:
        for query in queries:
            visible = [token for token in held if token <= query]
            scores = k[visible].double() @ head[query].double() * scale
            values = scores.softmax(0) if attention == "prob" else scores
            for token, value in zip(visible, values.tolist(), strict=True):
                sums[token] += value / (len(queries) * len(q))
    return sums
