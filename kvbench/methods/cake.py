"""CAKE: layers by how spread and how changing their attention is, tokens by its mean and its variance."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.capacities import Floats, Ints
from kvbench.methods.shared.layer_shares import LayerShares, LayerStatistics
from kvbench.methods.shared.scored import ObservationWindow
from kvbench.methods.shared.select import (
    Window,
    choose_window,
    find_slots,
    find_valid_queries,
    fit_window,
    smooth_outside,
    softmax_seen,
)
from kvbench.methods.shared.view import View


@dataclass
class AttentionSpread(LayerStatistics):
    """Calibrates the entropy and the variance of a window's attention to earlier slots, [L, K, 2].

    Both are summed over heads and slots, the entropy over queries too (CAKE, arXiv:2503.12491). Conditional rows count.

    Attributes:
        window: tokens of the window.
        queries: which tokens (`select.choose_window`).
    """

    window: int
    queries: Window

    kind: ClassVar[str] = "attention_spread"
    numbers: ClassVar[int] = 2

    def measure(self, view: View) -> Tensor:
        """Return entropy and variance of every sequence, float32 [sequences, 2]."""
        chosen = choose_window(self.queries, view.segment, self.window)
        attention, asking = attend_window(view, chosen)
        attention = attention.masked_fill(find_slots(view, chosen)[:, None, None], 0)
        entropy = -(attention * (attention + 1e-10).log()).sum((1, 2, 3))
        variance = measure_moments(attention, asking)[1].sum((1, 2))
        return torch.stack((entropy, variance), 1).unflatten(0, (-1, view.heads)).sum(1)


def attend_window(view: View, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the attention of a window's queries, float32 [rows, query heads per KV head, n, slots], and who asks.

    Of a query that a row does not have the attention is 0; the second value is that of `select.find_valid_queries`.
    """
    attention, asking = softmax_seen(view.scores(chosen)), find_valid_queries(view, chosen)
    return attention if asking is None else attention.masked_fill(~asking[:, None, :, None], 0), asking


def measure_moments(attention: Tensor, asking: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance over queries of attention [rows, query heads, n, slots]: [rows, query heads, slots].

    The variance has the divisor n - 1 and is 0 of one query.

    Args:
        attention: 0 of queries that a row does not have.
        asking: bool [rows, n], those that it has; None for all.
    """
    exists = torch.ones_like(attention[:, 0, :, 0]) if asking is None else asking.float()
    count = exists.sum(1)[:, None, None].clamp(min=1)
    mean = attention.sum(2) / count
    squares = ((attention - mean[:, :, None]) * exists[:, None, :, None]).square().sum(2)
    return mean, squares / (count - 1).clamp(min=1)


def share_officially(raw: Floats, total: int, length: int) -> Ints:
    """Round shares of layers as the released program does, int64 [layers]; some may exceed `length`.

    Args:
        raw: [layers], shares of `total`.
        total: tokens of one head of each layer together.
        length: tokens that there are for a layer to hold.
    """
    share = raw.astype(np.int64)
    over = int((share - length).clip(0).sum())
    share = np.minimum(share, length)
    _spread(share, share < length, over)
    missing = total - int(share.sum())
    _spread(share, share < length if missing > 0 else share > 1, missing)
    return share


def _spread(share: Ints, takers: NDArray[np.bool_], tokens: int) -> None:
    """Add tokens to the layers that take some, or take them away, evenly; the first ones have what does not divide."""
    places = np.flatnonzero(takers)
    if len(places) and tokens:
        each, more = divmod(abs(tokens), len(places))
        share[places] += (each + (np.arange(len(places)) < more)) * (1 if tokens > 0 else -1)


@dataclass
class CAKE(LayerShares, ObservationWindow):
    """Share B among layers by preference, and keep in each what a window attends to most and most unevenly.

    A layer's preference is H^(1/tau1) V^(1/tau2): H is the entropy of the window's attention to earlier slots, V its
    variance over the window's queries, both summed (CAKE, arXiv:2503.12491). A slot's score is mean attention plus
    gamma times its variance over the queries, the mean of five neighbours. The window stays.

    Differs from the program in: it shares B once, behind the prompt, and cuts layers again as later ones become known,
    so that its peak is B and a layer; a method here sees one layer at a time. `calibrated` has the preferences of other
    prompts and `previous` those of the sequence's segment before (`LayerShares`). The window moves along with the
    segments; over a grid the variance is one over places. Each sequence counts for itself, the released program adds up
    the batch. Models have their own tau there, 1 unless listed.

    Attributes:
        tau1: root of the entropy.
        tau2: root of the variance.
        gamma: weight of the variance in a slot's score.
        rounding: `exact` uses all of B, as far as heads divide it; `official` shares tokens outside the window as the
            program does, which can leave some unused.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    gamma: float = 200.0
    rounding: Literal["exact", "official"] = "exact"

    limits = set_limits(
        tau1=Limit(1e-3, wants="must be positive"),
        tau2=Limit(1e-3, wants="must be positive"),
        gamma=Limit(0),
        window=Limit(2, wants="must be at least 2, as one query has no variance"),
    )

    @cached_property
    def observer(self) -> LayerStatistics:
        """Entropy and variance of the window's attention."""
        return AttentionSpread(self.window, self.queries)

    @property
    def min_tokens(self) -> int:
        """Sinks, the window and a token, where the budget has them."""
        return min(super().min_tokens + self._fitted + 1, self.budget.head_tokens)

    @property
    def _fitted(self) -> int:
        return fit_window(self.window, self.budget.head_tokens)

    def fit(self, view: View) -> int:
        """Return the tokens of the window, as many in every layer."""
        return self._fitted

    def weigh(self, numbers: Floats) -> Floats:
        """Return preferences, the largest being 1."""
        preference = numbers[..., 0].clip(0) ** (1 / self.tau1) * numbers[..., 1].clip(0) ** (1 / self.tau2)
        largest = preference.max(-1, keepdims=True)
        equal = np.where(largest > 0, preference / np.where(largest > 0, largest, 1), 1)
        weights: Floats = equal.clip(1e-9)
        return weights

    def divide(self, weights: Floats, tokens: int, length: int, reach: Ints) -> Ints:
        """Divide tokens among layers: exactly, or those outside the window as the program does."""
        if self.rounding == "exact":
            return super().divide(weights, tokens, length, reach)
        total, outside = tokens // self.spec.heads - self._fitted * self.spec.layers, length - self._fitted
        if outside <= 0 or total < len(weights):
            return super().divide(weights, tokens, length, reach)
        shares = share_officially(weights / weights.sum() * total, total, outside)
        return np.minimum(np.minimum(shares, outside) + self._fitted, reach)

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return smoothed mean plus gamma times variance, float32 [rows, slots]."""
        mean, variance = measure_moments(*attend_window(view, chosen))
        scores = (mean + self.gamma * variance).mean(1)
        return smooth_outside(scores, inside, "avg", self.kernel, exists=self.valid_slots(view))
