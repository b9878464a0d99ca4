"""Leverage of keys, attention without a mask, and Compactor, the sum of both."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.files import derive_seed
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_leading, smooth, softmax_seen
from kvbench.methods.shared.uses import SOLVED_BY_LIBRARY
from kvbench.methods.shared.view import View

REGULARISER = 0.01
"""Added to the diagonal of the sketched keys' Gram matrix, as in kvpress."""


def measure_leverage(keys: Tensor, exists: Tensor, sketch: Tensor) -> Tensor:
    """Return the leverage of each key within its row, float32 [rows, slots].

    Keys [rows, slots, D] are not rotated, `exists` is bool [rows, slots], and `sketch` is a Gaussian projection of
    channels, [rows, D, m].
    """
    # In float32 the leverages of a few tokens, which are nearly equal, differ by rounding alone.
    keys, exists, sketch = keys.double(), exists[..., None].double(), sketch.double()
    mean = (keys * exists).sum(1, keepdim=True) / exists.sum(1, keepdim=True).clamp(min=1)
    x = (keys - mean) * exists @ sketch / sketch.shape[-1] ** 0.5
    gram = x.mT @ x + REGULARISER * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return (x * torch.linalg.solve(gram, x.mT).mT).sum(-1).clamp(min=0).float()


def attend_unmasked(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    exists: Tensor,
    chunk: int,
    *,
    official_padding: bool = False,
) -> Tensor:
    """Return the attention that slots receive from all queries of their chunk, times value norms: float32 [rows, n].

    Queries, float32 [rows, query heads per KV head, n, D], are not scaled; keys and values are [rows, n, D]. A row's
    chunks of `chunk` slots begin at its first slot (`exists`, bool [rows, n]). The program pads a row's last chunk with
    zero queries and keys that are not masked (`official_padding`).
    """
    order = (~exists).sort(dim=1, stable=True).indices  # existing slots first
    inverse = order.argsort(1)
    exists, keys, values = exists.gather(1, order), take(keys, order), take(values, order)
    queries = take(queries, order[:, None].expand(queries.shape[:3]))
    received = []
    for first in range(0, keys.shape[1], chunk):
        slots = slice(first, first + chunk)
        valid = exists[:, None, slots]
        logits = queries[:, :, slots] @ keys[:, None, slots].float().mT
        logits = logits.masked_fill(~valid[:, :, None], 0 if official_padding else -torch.inf)
        missing = chunk - logits.shape[-1] if official_padding else 0
        logits = torch.nn.functional.pad(logits, (0, missing))
        attention = softmax_seen(logits)[..., : chunk - missing].masked_fill(~valid[..., None], 0)
        added = chunk - valid.sum(2) if official_padding else 0  # zero queries attend to all slots equally
        received.append(attention.sum(2).mean(1) + added / chunk)
    norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
    return smooth(torch.cat(received, 1) * norms, "avg", 3, exists).gather(1, inverse)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Return x [..., n, D] in the order int64 [..., n]."""
    return x.gather(-2, order[..., None].expand_as(x))


def standardise(x: Tensor, exists: Tensor, heads: int) -> Tensor:
    """Return x, float32 [rows, slots], with mean 0 and standard deviation 1 over all slots of a sequence's heads."""
    scores, mask = (rows.unflatten(0, (-1, heads)).flatten(1) for rows in (x, exists.float()))
    count = mask.sum(1, keepdim=True)
    mean = (scores * mask).sum(1, keepdim=True) / count.clamp(min=1)
    squares = ((scores - mean) * mask).square().sum(1, keepdim=True)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt().clamp(min=1e-12)
    return ((scores - mean) / deviation).view_as(x)


def draw_sketch(view: View, spec: ModelSpec, seed: int, size: int) -> Tensor:
    """Draw a layer's sketch, Gaussian values float32 [rows, D, size], equal in each sequence."""
    generator = torch.Generator().manual_seed(derive_seed(f"{seed}:{view.layer}"))
    heads = torch.randn(spec.first_head + view.heads, spec.head_dim, size, generator=generator)
    return heads[spec.first_head :].to(view.position.device).repeat(view.sequences, 1, 1)


@dataclass
class Leverage(Scored):
    """Keep the tokens whose keys, before rotation, have the highest leverage (Compactor, arXiv:2507.08143).

    Differs from the program in: eviction happens once per segment, and leverage is relative to the cached keys.

    Attributes:
        sketch: channels of the random projection of keys.
        seed: seed of the projection.
    """

    sketch: int = 48
    seed: int = 0

    revision: ClassVar[int] = 2  # before, leverage was solved for in float32
    limits = set_limits(sketch=Limit(1))
    graph_obstacle = SOLVED_BY_LIBRARY  # each row solves a linear system

    def score(self, view: View) -> Tensor:
        """Return the leverage of each key, float32 [rows, slots]."""
        sketch = draw_sketch(view, self.spec, self.seed, self.sketch)
        return measure_leverage(view.cached_keys(rotated=False), view.position >= 0, sketch)


@dataclass
class NonCausal(Scored):
    """Score tokens by attention from earlier and later neighbours, times the norm of their values.

    Each segment is scored once, at its end, in chunks with attention without a causal mask and logits without a scale.
    Scores are standardised in each segment, to compare segments (Compactor, arXiv:2507.08143; kvpress).

    Differs from the program in: the program compresses a prompt once and compares all of it. In images a last chunk
    that is not full is masked (`official_padding`), so that in a short line the chunk is the line.

    Attributes:
        chunk: tokens of a chunk.
        official_padding: pad the last chunk with zeros that are not masked, as always in texts: otherwise the few
            tokens of a last chunk share all of its attention, and are kept.
    """

    chunk: int = 256
    official_padding: bool = False

    recordable: ClassVar[bool] = True
    own_state: ClassVar[int] = 1
    revision: ClassVar[int] = 4  # before, the last chunk of a text was masked by default
    limits = set_limits(chunk=Limit(1))
    heads_independent = False  # heads of a sequence share mean and standard deviation
    uses_value_norms = True  # scores contain the norm of values

    def observe(self, view: View) -> None:
        """Store the scores of the segment's tokens as state."""
        length = view.segment.length
        exists = view.position[:, -length:] >= 0
        view.state[:, -length:] = self.measure(view, slice(0, length), exists)

    def measure(self, view: View, tokens: slice, exists: Tensor) -> Tensor:
        """Return standardised scores of some tokens of the segment, float32 [rows, n]."""
        queries = view.queries(torch.arange(view.segment.length)[tokens]) / self.spec.logit_scale
        keys, values = view.keys()[:, tokens], view.values()[:, tokens]
        pads = self.official_padding or self.spec.writes_text
        scores = attend_unmasked(queries, keys, values, exists, self.chunk, official_padding=pads)
        return standardise(scores, exists, view.heads)

    def score(self, view: View) -> Tensor:
        """Return the score of each token at the end of its segment, float32 [rows, slots]."""
        return view.state


@dataclass
class Compactor(NonCausal):
    """Keep the tokens of highest leverage and attention without a mask, both standardised (arXiv:2507.08143).

    A token's score is the `noncausal` score plus `mix` times the leverage of its key within its segment. The first
    tokens (`leading`) and the last tokens (`trailing`) are kept, and excluded from both.

    Differs from the program in: see `noncausal`. The program's `mix` is the compression ratio of a run, or 0.35, and
    its `leading` is 8.

    Attributes:
        mix: weight of leverage.
        trailing: last tokens of the newest segment, which are kept; 4 in the program.
        sketch: channels of the random projection of keys.
        seed: seed of the projection.
    """

    mix: float = 0.35
    trailing: int = 4
    sketch: int = 48
    seed: int = 0

    revision: ClassVar[int] = 6  # before, the last chunk of a text was masked by default
    limits = set_limits(chunk=Limit(1), mix=Limit(0), trailing=Limit(0), sketch=Limit(1))
    graph_obstacle = SOLVED_BY_LIBRARY  # each row solves a linear system

    def observe(self, view: View) -> None:
        """Score the segment's tokens except the first and last tokens."""
        length = view.segment.length
        tokens = slice(max(0, self.leading - view.segment.start), length - self.trailing)
        if tokens.start >= tokens.stop:
            return
        exists = (view.position >= 0) & ~find_leading(view, self.leading)
        exists = exists[:, -length:][:, tokens]
        sketch = draw_sketch(view, self.spec, self.seed, self.sketch)
        leverage = measure_leverage(view.keys(rotated=False)[:, tokens], exists, sketch)
        scores = self.mix * standardise(leverage, exists, view.heads) + self.measure(view, tokens, exists)
        view.state[:, -length:][:, tokens] = scores

    def score(self, view: View) -> Tensor:
        """Return the scores, infinity for the first and last tokens: float32 [rows, slots]."""
        stays = find_leading(view, self.leading) | (view.position >= view.segment.end - self.trailing)
        return view.state.masked_fill(stays & (view.position >= 0), torch.inf)
