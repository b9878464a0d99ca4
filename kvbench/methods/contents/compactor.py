"""Leverage of keys, attention without a mask, and Compactor, which adds them up."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.files import derive_seed
from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import smooth, softmax_seen
from kvbench.methods.shared.view import View

REGULARISER = 0.01


def measure_leverage(keys: Tensor, exists: Tensor, sketch: Tensor) -> Tensor:
    """Return the leverage of each key among those of its row, float32 [rows, slots].

    Args:
        keys: without rotation, [rows, slots, D].
        exists: bool [rows, slots].
        sketch: Gaussian numbers [rows, D, m] that channels are projected by.
    """
    exists = exists[..., None].float()
    mean = (keys.float() * exists).sum(1, keepdim=True) / exists.sum(1, keepdim=True).clamp(min=1)
    x = (keys.float() - mean) * exists @ sketch / sketch.shape[-1] ** 0.5
    gram = x.mT @ x + REGULARISER * torch.eye(x.shape[-1], device=x.device)
    return (x * torch.linalg.solve(gram, x.mT).mT).sum(-1).clamp(min=0)


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

    Args:
        queries: not scaled, float32 [rows, query heads per KV head, n, D].
        keys: [rows, n, D].
        values: shaped like `keys`.
        exists: bool [rows, n].
        chunk: slots of a chunk.
        official_padding: fill the last chunk with zero queries and keys that take part, as the program does.
    """
    received = []
    for first in range(0, keys.shape[1], chunk):
        part = slice(first, first + chunk)
        logits = queries[:, :, part] @ keys[:, None, part].float().mT
        here = exists[:, None, part]
        logits = logits.masked_fill(~here[:, :, None], -torch.inf)
        missing = chunk - logits.shape[-1] if official_padding else 0
        if missing:
            zeros = logits.new_zeros(*logits.shape[:-1], missing)
            logits = torch.cat((logits, zeros), -1)
        attention = softmax_seen(logits)[..., : chunk - missing].masked_fill(~here[..., None], 0)
        received.append(attention.sum(2).mean(1) + missing / chunk)
    norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
    return smooth(torch.cat(received, 1) * norms, "avg", 3, exists)


def standardise(x: Tensor, exists: Tensor, heads: int) -> Tensor:
    """Return x [rows, slots] with mean 0 and deviation 1 over all slots of a sequence's heads."""
    own, there = (part.unflatten(0, (-1, heads)).flatten(1) for part in (x, exists.float()))
    count = there.sum(1, keepdim=True)
    mean = (own * there).sum(1, keepdim=True) / count.clamp(min=1)
    squares = ((own - mean) * there).square().sum(1, keepdim=True)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt().clamp(min=1e-12)
    return ((own - mean) / deviation).view_as(x)


def draw_sketch(seed: int, layer: int, heads: int, channels: int, size: int) -> Tensor:
    """Draw a layer's sketch, Gaussian numbers [heads, channels, size]."""
    generator = torch.Generator().manual_seed(derive_seed(f"{seed}:{layer}"))
    return torch.randn(heads, channels, size, generator=generator)


@dataclass
class Leverage(Scored):
    """Keep the tokens whose keys, before rotation, are least a mixture of the others' (Compactor, arXiv:2507.08143).

    Differs from the program in: tokens leave once a segment, and leverage is measured among what is cached by then.

    Attributes:
        sketch: channels that keys are projected to, at random.
        seed: of the projections.
    """

    sketch: int = 48
    seed: int = 0

    limits = set_limits(sketch=Limit(1))

    def score(self, view: View) -> Tensor:
        """Return the leverage of each key, float32 [rows, slots]."""
        return measure_leverage(view.cached_keys(rotated=False), view.position >= 0, self.project(view))

    def project(self, view: View) -> Tensor:
        """Return the random numbers of every row, [rows, D, m]."""
        first = self.spec.first_head
        drawn = draw_sketch(self.seed, view.layer, first + view.heads, self.spec.head_dim, self.sketch)[
            first:
        ]
        return drawn.to(view.position.device).repeat(view.sequences, 1, 1)


@dataclass
class NonCausal(Scored):
    """Keep the tokens that their neighbours attend to, earlier ones too, times the norm of their values.

    Each segment's tokens are scored when it ends, in chunks within which attention has no mask and logits no scale, and
    keep that score; segments are compared by scores of mean 0 and deviation 1 (Compactor, arXiv:2507.08143; kvpress).

    Differs from the program in: it compresses a prompt once and compares all of it. Of a short line the chunk is the
    line. A last chunk that is not full is masked (`official_padding`).

    Attributes:
        chunk: tokens of a chunk.
        official_padding: fill the last chunk with zeros that take part.
    """

    chunk: int = 256
    official_padding: bool = False

    accumulates: ClassVar[bool] = True
    limits = set_limits(chunk=Limit(1))

    @property
    def heads_independent(self) -> bool:
        """Heads of a sequence share mean and deviation."""
        return False

    @property
    def uses_value_norms(self) -> bool:
        """Scores contain the norm of values."""
        return True

    def observe(self, view: View) -> None:
        """Score the segment's tokens."""
        length = view.segment.length
        exists = view.position[:, -length:] >= 0
        view.state[:, -length:] = self.measure(view, slice(0, length), exists)

    def measure(self, view: View, part: slice, exists: Tensor) -> Tensor:
        """Return standardised scores of a part of the segment, float32 [rows, n]."""
        queries = view.queries(torch.arange(view.segment.length)[part]) / self.spec.logit_scale
        keys, values = view.keys()[:, part], view.values()[:, part]
        found = attend_unmasked(
            queries, keys, values, exists, self.chunk, official_padding=self.official_padding
        )
        return standardise(found, exists, view.heads)

    def score(self, view: View) -> Tensor:
        """Return what each token scored when its segment ended, float32 [rows, slots]."""
        return view.state


@dataclass
class Compactor(NonCausal):
    """Keep the tokens of highest leverage and attention without a mask, both standardised (arXiv:2507.08143).

    A token's score is that of `noncausal` plus `mix` times the leverage of its key among its segment's. The first and
    the last tokens stay and are left out of both.

    Differs from the program in: what `noncausal` does. Its weight is the compression ratio of a run, 0.35 without one.

    Attributes:
        mix: weight of leverage.
        leading: first tokens of the sequence that stay, 8 in the program.
        trailing: last tokens of the newest segment that stay, 4 in the program.
        sketch: channels that keys are projected to, at random.
        seed: of the projections.
    """

    mix: float = 0.35
    leading: int = 0
    trailing: int = 4
    sketch: int = 48
    seed: int = 0

    limits = set_limits(chunk=Limit(1), mix=Limit(0), leading=Limit(0), trailing=Limit(0), sketch=Limit(1))

    def observe(self, view: View) -> None:
        """Score the segment's tokens but for the first and the last ones."""
        length = view.segment.length
        part = slice(max(0, self.leading - view.segment.start), length - self.trailing)
        if part.start >= part.stop:
            return
        exists = view.position[:, -length:][:, part] >= 0
        first = self.spec.first_head
        sketch = draw_sketch(self.seed, view.layer, first + view.heads, self.spec.head_dim, self.sketch)[
            first:
        ]
        rows = sketch.to(view.position.device).repeat(view.sequences, 1, 1)
        leverage = measure_leverage(view.keys(rotated=False)[:, part], exists, rows)
        scores = self.mix * standardise(leverage, exists, view.heads) + self.measure(view, part, exists)
        view.state[:, -length:][:, part] = scores

    def score(self, view: View) -> Tensor:
        """Return scores, float32 [rows, slots], infinity for the first and the last tokens."""
        stays = (view.position < self.leading) | (view.position >= view.segment.end - self.trailing)
        return view.state.masked_fill(stays & (view.position >= 0), torch.inf)
