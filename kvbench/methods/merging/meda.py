"""MEDA: capacities of layers by the entropy of attention between text and image, with merging of evicted tokens."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.merging.merge import How, merge_slots, pair_slots
from kvbench.methods.shared.capacities import Floats, Ints
from kvbench.methods.shared.layer_shares import LayerShares, LayerStatistics
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.select import find_latest, softmax_seen, sum_attention
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

Statistic = Literal["auto", "cross", "whole", "variance"]
"""Measure of a layer's share. `cross`: entropies of attention from text to image and from image to text; `whole`:
entropy of all attention; `variance`: D2O's variance of received attention. `auto` is `cross` for images after a
condition, else `whole`."""
MIN_PROBABILITY = 1e-12
"""Minimum probability in an entropy, which keeps its logarithm finite."""
QUERY_BATCH = 256
"""Maximum number of queries whose attention is in memory at a time."""


def measure_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of attention in nats, summed over queries, float32 [...]; logits are [..., queries, slots]."""
    attention = softmax_seen(logits).clamp(min=MIN_PROBABILITY)
    return -(attention * attention.log()).sum((-2, -1))


def compare_columns(columns: Tensor, heads: int) -> Tensor:
    """Return D2O's statistic of a layer, float32 [sequences]: mean over heads of variances scaled to 0..1 over heads.

    Columns are float32 [sequences, heads, slots], the attention that each slot received, NaN in missing slots.
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
    """Calibration of the entropy of each layer's attention, or D2O's variance, over conditional sequences: [L, K, 1].

    `cross` adds the entropies of two attentions without a causal mask, each a mean over queries and heads: from the
    condition's queries to the image's tokens, and from the newest line to the condition (MEDA, arXiv:2502.17599, Eq. 4
    to 6). It is 0 after the condition itself.

    Attributes:
        statistic: see `Statistic`.
    """

    statistic: Statistic = "auto"
    _text: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    kind: ClassVar[str] = "layer_entropies"

    def measure(self, view: View) -> Tensor:
        """Return the statistic of each sequence, float32 [sequences, 1]."""
        if self.statistic == "variance":
            received = sum_attention(view).masked_fill(view.position < 0, torch.nan)
            return compare_columns(received.unflatten(0, (-1, view.heads)), view.heads)[:, None]
        if self.statistic == "whole" or not self.spec.line:
            entropies = self._measure_whole(view)
        elif view.segment.index == 0:
            self._text[view.layer] = view.queries(torch.arange(view.segment.length))
            entropies = torch.zeros(len(view.position), device=view.position.device)
        else:
            entropies = self._measure_cross(view)
        return entropies.unflatten(0, (-1, view.heads)).mean(1)[:, None]

    def _measure_whole(self, view: View) -> Tensor:
        """Return the mean entropy of the segment's queries, float32 [rows]."""
        batches = torch.arange(view.segment.length).split(QUERY_BATCH)
        total = sum((measure_entropy(view.scores(batch)).mean(1) for batch in batches), torch.zeros(()))
        padding = 0 if view.padding is None or view.segment.index else view.padding
        return total / (view.segment.length - padding)

    def _measure_cross(self, view: View) -> Tensor:
        """Return the sum of the mean entropies from text to image and from image to text, float32 [rows]."""
        line, prompt = view.queries(torch.arange(view.segment.length)), self._text[view.layer]
        index = torch.arange(prompt.shape[2], device=prompt.device)
        valid = None if view.padding is None else index >= view.padding[:, None]
        text = view.segment_ids == 0
        image = (view.position >= 0) & ~text
        return measure_cross_entropy(prompt, line, view.cached_keys(), text, image, valid)


def measure_cross_entropy(
    prompt: Tensor, line: Tensor, keys: Tensor, text: Tensor, image: Tensor, valid: Tensor | None = None
) -> Tensor:
    """Return the entropies of attention from text to image and from image to text, added: float32 [rows], in nats.

    Each entropy is a mean over queries and query heads, without a causal mask.

    Args:
        prompt: float32 [rows, query heads per KV head, n, D], scaled queries of the text.
        line: scaled queries of the image, likewise.
        keys: [rows, slots, D].
        text: bool [rows, slots], slots of the text.
        image: bool [rows, slots], slots of the image.
        valid: bool [rows, n], queries of the text that a row has; None for all.
    """
    transposed = keys.float().mT[:, None]
    to_image = softmax_seen((prompt @ transposed).masked_fill(~image[:, None, None], -torch.inf))
    to_image = to_image.clamp(min=MIN_PROBABILITY)
    to_text = (line @ transposed).masked_fill(~text[:, None, None], -torch.inf)
    by_query = -(to_image * to_image.log()).sum(-1).mean(1)
    exists = torch.ones_like(by_query) if valid is None else valid.float()
    mean = (by_query * exists).sum(1) / exists.sum(1).clamp(min=1)
    return mean + measure_entropy(to_text).mean(1) / line.shape[2]


def clamp_shares(statistics: Floats, share: float) -> Floats:
    """Return the share of tokens that each layer keeps in the released code, float64 [L] (MEDA Eq. 7, D2O).

    It is the softmax of the layers' statistics, scaled to mean `share` and clamped to 0.01..1 without redistribution.
    """
    weights = np.exp(statistics - statistics.max())
    shares: Floats = (weights / weights.sum() * len(statistics) * share).clip(0.01, 1)
    return shares


@dataclass
class MEDA(LayerShares):
    """Share B among layers by the entropy of attention between text and image; keep and merge as LOOK-M does.

    A layer's share is the softmax over layers of its entropy (MEDA, arXiv:2502.17599, Eq. 7): layers with spread
    attention get more. Each layer keeps the latest slots and the slots of most accumulated attention, half of each, and
    averages evicted slots into the slot of most similar key.

    Differs from the paper in: eviction follows each segment instead of the prompt only. Shares come from other prompts
    or from the previous segment (`LayerShares`) and fill B; the paper clamps shares to 0.01..1 and loses the rest
    (`official_clamp`). The entropy needs text in the cache, the condition of next-token images; next-scale models and
    texts use the entropy of all attention (`whole`), as does the released code. Only the newest line's queries
    represent the image. The text prior, which keeps all text, is `sinks=1`; the code's default merges by `pivot` and
    widens a window smaller than the text. Query heads that share a KV head use their mean.

    `statistic=variance` is D2O's rule instead (arXiv:2406.13035): the softmax of minus the mean over heads of the
    variance of received attention, scaled to 0..1 over the layer's heads.

    Attributes:
        statistic: see `Statistic`.
        temperature: temperature of the softmax over layers.
        recent: share of the latest tokens; the paper's text has 0.75, its code 0.5.
        how: merging of evicted slots (`merge.How`); `none` drops them.
        official_clamp: clamp shares as the paper does, with a measured peak.
    """

    statistic: Statistic = "auto"
    temperature: float = 1.0
    recent: float = 0.5
    how: How = "average"
    official_clamp: bool = False

    recordable: ClassVar[bool] = True
    own_state: ClassVar[int] = 1
    limits = set_limits(recent=SHARE, temperature=Limit(1e-3, wants="must be positive"))

    def __post_init__(self) -> None:
        """Set `strict` if B is never exceeded."""
        super().__post_init__()
        self.strict = self.strict and not self.official_clamp

    @property
    def uses(self) -> Uses:
        """`Scored.uses`, with replaced contents of slots if evicted slots are merged."""
        return replace(super().uses, replaces=self.how != "none")

    @cached_property
    def observer(self) -> LayerStatistics:
        """Calibration of entropies or variances."""
        return LayerEntropies(self.statistic)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse `cross` if the cache does not contain both text and image, and what `Scored` refuses."""
        super().check(spec, budget)
        if self.statistic == "cross" and not spec.line:
            raise ValueError(
                f"method.statistic=cross: {spec.name} does not attend from an image to a text in its cache; set "
                "method.statistic=whole"
            )

    def weigh(self, statistics: Floats) -> Floats:
        """Return the exponentials of the layers' statistics, float64 [..., L], scaled to a maximum of 1."""
        signed = statistics[..., 0] / self.temperature * (-1 if self.statistic == "variance" else 1)
        weights: Floats = np.exp(signed - signed.max(-1, keepdims=True)).clip(1e-9)
        return weights

    def divide(self, weights: Floats, tokens: int, length: int, reach: Ints) -> Ints:
        """Divide tokens among layers: int64 [layers], tokens of each head; `official_clamp` can leave some unused."""
        if not self.official_clamp:
            return super().divide(weights, tokens, length, reach)
        share = tokens / (self.spec.heads * len(weights) * length)
        tokens_kept = (clamp_shares(np.log(weights), min(share, 1.0)) * length).astype(np.int64)
        return np.minimum(tokens_kept.clip(self.min_tokens), reach)

    def observe(self, view: View) -> None:
        """Add the segment's attention to each slot's sum, and measure the layer if shares are not calibrated."""
        super().observe(view)
        view.state += sum_attention(view)

    def score(self, view: View) -> Tensor:
        """Return accumulated attention, float32 [rows, slots], infinity for the latest tokens."""
        return view.state.masked_fill(
            find_latest(view, self.recent, self.list_min_capacities(view)), torch.inf
        )

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select each row's best slots, bool [rows, slots], and merge the rest into them."""
        exists = view.position >= 0
        stays = super().select_slots(view, ranked) & exists
        if self.how != "none":
            keys = view.cached_keys()
            pairs = pair_slots(keys, exists & ~stays, stays)
            view.replace(*merge_slots(keys, view.cached_values(), pairs, pairs.leaves, self.how))
        return stays
