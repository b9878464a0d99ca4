"""MEDA: layers by the entropy of attention between text and image, tokens by attention, and what leaves is merged."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.merging.merge import How, merge_slots, pair_slots
from kvbench.methods.shared.base import SHARE, Limit, set_limits
from kvbench.methods.shared.capabilities import ReplacesContents
from kvbench.methods.shared.capacities import Floats, Ints
from kvbench.methods.shared.layer_shares import LayerShares, LayerStatistics
from kvbench.methods.shared.select import find_latest, softmax_seen, sum_attention
from kvbench.methods.shared.view import View

Statistic = Literal["auto", "cross", "whole", "variance"]
"""Measure of a layer's share: the entropies of attention from text to image and from image to text; that of all
attention; D2O's variance of what slots receive. `auto` is `cross` for images after a condition, else `whole`."""
MIN_PROBABILITY = 1e-12
QUERIES_AT_ONCE = 256


def measure_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of attention in nats, summed over queries, float32 [...], of logits [..., queries, slots]."""
    attention = softmax_seen(logits).clamp(min=MIN_PROBABILITY)
    return -(attention * attention.log()).sum((-2, -1))


def compare_columns(columns: Tensor, heads: int) -> Tensor:
    """Return D2O's number of a layer, float32 [sequences]: how much variances of received attention differ by head.

    Args:
        columns: float32 [sequences, heads, slots], attention that each slot received; NaN where there is no slot.
        heads: of a sequence.
    """
    exists = ~columns.isnan()
    count = exists.sum(-1).clamp(min=1)
    mean = columns.nansum(-1) / count
    squares = (columns - mean[..., None]).square().nansum(-1)
    variance = squares / (count - 1).clamp(min=1)
    low, high = variance.amin(-1, keepdim=True), variance.amax(-1, keepdim=True)
    return ((variance - low) / (high - low + 1e-6)).sum(-1) / heads


@dataclass
class LayerEntropies(LayerStatistics):
    """Calibrates the entropy of each layer's attention, [L, K, 1], or D2O's variance, of conditional sequences.

    `cross` adds the entropies of two attentions without a causal mask, each a mean over its queries and over heads: of
    the condition's queries to the image's tokens, and of the newest line's to the condition (MEDA, arXiv:2502.17599,
    Eq. 4 to 6). It is 0 after the condition itself.

    Attributes:
        statistic: see `Statistic`.
    """

    statistic: Statistic = "auto"
    _text: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    kind: ClassVar[str] = "layer_entropies"

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse the entropy between text and image where attention has no text."""
        super().check(spec, budget)
        check_statistic(self.statistic, spec)

    def measure(self, view: View) -> Tensor:
        """Return the number of every sequence, float32 [sequences, 1]."""
        if self.statistic == "variance":
            received = sum_attention(view).masked_fill(view.position < 0, torch.nan)
            return compare_columns(received.unflatten(0, (-1, view.heads)), view.heads)[:, None]
        if self.statistic == "whole" or not self.spec.line:
            by_row = self._measure_whole(view)
        elif view.segment.index == 0:
            self._text[view.layer] = view.queries(torch.arange(view.segment.length))
            by_row = torch.zeros(len(view.position), device=view.position.device)
        else:
            by_row = self._measure_cross(view)
        return by_row.unflatten(0, (-1, view.heads)).mean(1)[:, None]

    def _measure_whole(self, view: View) -> Tensor:
        """Return the mean entropy of the segment's queries, float32 [rows]."""
        padding = view.padding if view.segment.index == 0 else None
        parts = torch.arange(view.segment.length).split(QUERIES_AT_ONCE)
        total = sum((measure_entropy(view.scores(part)).mean(1) for part in parts), torch.zeros(()))
        count = view.segment.length if padding is None else view.segment.length - padding
        return total / count

    def _measure_cross(self, view: View) -> Tensor:
        """Return the entropies from text to image and from image to text, each a mean over queries: float32 [rows]."""
        line, prompt = view.queries(torch.arange(view.segment.length)), self._text[view.layer]
        place = torch.arange(prompt.shape[2], device=prompt.device)
        asking = None if view.padding is None else place >= view.padding[:, None]
        text = view.segment_ids == 0
        return measure_cross_entropy(
            prompt, line, view.cached_keys(), text, (view.position >= 0) & ~text, asking
        )


def measure_cross_entropy(
    prompt: Tensor, line: Tensor, keys: Tensor, text: Tensor, image: Tensor, asking: Tensor | None = None
) -> Tensor:
    """Return the entropy of attention from text to image plus that from image to text, float32 [rows], in nats.

    Each is a mean over its queries and over query heads, and no query is masked.

    Args:
        prompt: scaled queries of the text, float32 [rows, query heads per KV head, n, D].
        line: scaled queries of the image, likewise.
        keys: [rows, slots, D].
        text: bool [rows, slots].
        image: bool [rows, slots].
        asking: bool [rows, n], the text's queries that exist; None for all.
    """
    turned = keys.float().mT[:, None]
    to_image = softmax_seen((prompt @ turned).masked_fill(~image[:, None, None], -torch.inf)).clamp(
        min=MIN_PROBABILITY
    )
    to_text = (line @ turned).masked_fill(~text[:, None, None], -torch.inf)
    by_query = -(to_image * to_image.log()).sum(-1).mean(1)
    exists = torch.ones_like(by_query) if asking is None else asking.float()
    of_text = (by_query * exists).sum(1) / exists.sum(1).clamp(min=1)
    return of_text + measure_entropy(to_text).mean(1) / line.shape[2]


def check_statistic(statistic: Statistic, spec: ModelSpec) -> None:
    """Refuse the entropy between text and image where a cache does not hold both.

    Raises:
        ValueError: naming the setting.
    """
    if statistic == "cross" and not spec.line:
        raise ValueError(
            f"method.statistic=cross: {spec.name} does not attend from an image to a text in its cache; set "
            "method.statistic=whole"
        )


def clamp_shares(numbers: Floats, share: float) -> Floats:
    """Return the share of the tokens that each layer keeps, [L], as released programs have it (MEDA Eq. 7, D2O).

    It is the softmax of the layers' numbers, with a mean of `share`, between 0.01 and 1; what that cuts off is lost.
    """
    weights = np.exp(numbers - numbers.max())
    shares: Floats = (weights / weights.sum() * len(numbers) * share).clip(0.01, 1)
    return shares


@dataclass
class MEDA(ReplacesContents, LayerShares):
    """Share B among layers by the entropy of attention between text and image, keep and merge as LOOK-M does.

    A layer's share is the softmax over layers of its entropy (MEDA, arXiv:2502.17599, Eq. 7): layers whose attention is
    spread have more. In each, half of the slots are the latest, half those of most accumulated attention, and what
    leaves is averaged into the slot of most similar key.

    Differs from the paper in: it is done once a segment instead of once behind a prompt; shares are known from other
    prompts or of the segment before (`LayerShares`), and fill B, where the paper cuts shares off at 0.01 and 1 and
    loses the rest (`official_clamp`). Its entropy needs a text in the cache, the condition of next-token images;
    next-scale models and texts have the entropy of all attention (`whole`), which is also what the released program
    computes. The image's queries are those of the newest line. The text prior, which keeps all text, is `sinks=1`; the
    program's default merges by `pivot` and widens a window smaller than the text. Grouped query heads share a mean.

    `statistic=variance` shares by D2O's rule instead (arXiv:2406.13035): the softmax of minus the mean over heads of
    the variance of received attention, scaled to 0..1 over the layer's heads.

    Attributes:
        statistic: see `Statistic`.
        temperature: of the softmax over layers.
        recent: share of the latest tokens; the paper's text has 0.75, its program 0.5.
        how: what becomes of what leaves (`merge.How`); `none` drops it.
        official_clamp: shares cut off, with a peak that is measured.
    """

    statistic: Statistic = "auto"
    temperature: float = 1.0
    recent: float = 0.5
    how: How = "average"
    official_clamp: bool = False

    accumulates: ClassVar[bool] = True
    limits = set_limits(recent=SHARE, temperature=Limit(1e-3, wants="must be positive"))

    def __post_init__(self) -> None:
        """Note whether B is never exceeded."""
        super().__post_init__()
        self.strict = self.strict and not self.official_clamp

    @property
    def replaces(self) -> bool:
        """Whether what leaves is merged."""
        return self.how != "none"

    @cached_property
    def observer(self) -> LayerStatistics:
        """Entropies, or variances."""
        return LayerEntropies(self.statistic)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings out of range or not for the model, and what `Scored` refuses."""
        super().check(spec, budget)
        check_statistic(self.statistic, spec)

    def weigh(self, numbers: Floats) -> Floats:
        """Return the exponentials of the layers' numbers, the largest being 1."""
        signed = numbers[..., 0] / self.temperature * (-1 if self.statistic == "variance" else 1)
        weights: Floats = np.exp(signed - signed.max(-1, keepdims=True)).clip(1e-9)
        return weights

    def divide(self, weights: Floats, tokens: int, length: int, reach: Ints) -> Ints:
        """Divide tokens among layers: all of them, or what the clamp leaves."""
        if not self.official_clamp:
            return super().divide(weights, tokens, length, reach)
        share = tokens / (self.spec.heads * len(weights) * length)
        held = (clamp_shares(np.log(weights), min(share, 1.0)) * length).astype(np.int64)
        return np.minimum(held.clip(self.min_tokens), reach)

    def observe(self, view: View) -> None:
        """Add the segment's attention to every slot's sum, and measure the layer where that is wanted."""
        super().observe(view)
        view.state += sum_attention(view)

    def score(self, view: View) -> Tensor:
        """Return accumulated attention, float32 [rows, slots], infinity for the latest tokens."""
        return view.state.masked_fill(find_latest(view, self.recent, self.min_capacity(view)), torch.inf)

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the best of every row, and merge the rest into them."""
        exists = view.position >= 0
        kept = super().choose(view, ranked) & exists
        if self.replaces:
            keys, pairs = view.cached_keys(), pair_slots(view.cached_keys(), exists & ~kept, kept)
            view.replace(*merge_slots(keys, view.cached_values(), pairs, pairs.leaves, self.how))
        return kept
