"""CAKE: capacities of layers by entropy and variance of attention, scores of tokens by its mean and variance."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.methods.shared.capacities import Floats, Ints
from kvbench.methods.shared.layer_shares import LayerShares, LayerStatistics
from kvbench.methods.shared.limits import Limit, set_limits
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
    """Calibration of the entropy and the variance of a window's attention to earlier slots, [L, K, 2].

    Both are summed over heads and slots of conditional rows, and the entropy over queries too (CAKE, arXiv:2503.12491).

    Attributes:
        window: tokens of the window.
        queries: placement of the window (`select.choose_window`).
    """

    window: int
    queries: Window

    kind: ClassVar[str] = "attention_spread"
    count: ClassVar[int] = 2

    def measure(self, view: View) -> Tensor:
        """Return entropy and variance of each sequence, float32 [sequences, 2]."""
        chosen = choose_window(self.queries, view.segment, self.window)
        attention, valid = attend_window(view, chosen)
        attention = attention.masked_fill(find_slots(view, chosen)[:, None, None], 0)
        entropy = -(attention * (attention + 1e-10).log()).sum((1, 2, 3))
        variance = measure_moments(attention, valid)[1].sum((1, 2))
        return torch.stack((entropy, variance), 1).unflatten(0, (-1, view.heads)).sum(1)


def attend_window(view: View, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the attention of a window's queries and the valid queries of each row (`select.find_valid_queries`).

    Attention is float32 [rows, query heads per KV head, n, slots], 0 for queries that a row lacks.
    """
    attention, valid = softmax_seen(view.scores(chosen)), find_valid_queries(view, chosen)
    return attention if valid is None else attention.masked_fill(~valid[:, None, :, None], 0), valid


def measure_moments(attention: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance of attention over queries, each [rows, query heads, slots].

    The variance has the divisor n - 1 and is 0 for one query. Attention [rows, query heads, n, slots] is 0 for queries
    that a row lacks; `valid` is bool [rows, n], None for all.
    """
    exists = torch.ones_like(attention[:, 0, :, 0]) if valid is None else valid.float()
    count = exists.sum(1)[:, None, None].clamp(min=1)
    mean = attention.sum(2) / count
    squares = ((attention - mean[:, :, None]) * exists[:, None, :, None]).square().sum(2)
    return mean, squares / (count - 1).clamp(min=1)


def share_officially(raw: Floats, total: int, length: int) -> Ints:
    """Round the shares of layers as the released code does, int64 [layers]; some may exceed `length`.

    The shares `raw` [layers] add up to `total`, the sum over layers of the tokens of one head. Each layer has `length`
    tokens.
    """
    share = raw.astype(np.int64)
    over = int((share - length).clip(0).sum())
    share = np.minimum(share, length)
    _spread(share, share < length, over)
    missing = total - int(share.sum())
    _spread(share, share < length if missing > 0 else share > 1, missing)
    return share


def _spread(share: Ints, layers: NDArray[np.bool_], tokens: int) -> None:
    """Add tokens evenly to some layers, or subtract them; the first layers take the remainder."""
    indices = np.flatnonzero(layers)
    if len(indices) and tokens:
        even, more = divmod(abs(tokens), len(indices))
        share[indices] += (even + (np.arange(len(indices)) < more)) * (1 if tokens > 0 else -1)


@dataclass
class CAKE(LayerShares, ObservationWindow):
    """Share B among layers by preference, and keep the slots whose attention from a window has large mean and variance.

    The preference of a layer is H^(1/tau1) V^(1/tau2), with the entropy H of the window's attention to earlier slots
    and its variance V over the window's queries, both summed (CAKE, arXiv:2503.12491). The score of a slot is its mean
    attention plus gamma times its variance over the queries, averaged over five neighbours. The window is kept.

    Differs from the program in: the program shares B once after the prompt and shrinks layers as later layers are
    measured, so its peak is B plus one layer. Here a method sees one layer at a time: `calibrated` takes preferences
    from other prompts, `previous` from the previous segment of the sequence (`LayerShares`). The window moves with the
    segments; over a grid, the variance is over map positions. Each sequence is measured separately, while the program
    sums over the batch. The program sets tau per model, 1 unless listed.

    Attributes:
        tau1: root of the entropy.
        tau2: root of the variance.
        gamma: weight of the variance in a slot's score.
        rounding: `exact` uses all of B up to the remainder over heads; `official` shares tokens outside the window as
            the program does, which can leave some unused.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    gamma: float = 200.0
    rounding: Literal["exact", "official"] = "exact"

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 3  # before, capacities were for the longest prompt of texts
    limits = set_limits(
        tau1=Limit(1e-3, wants="must be positive"),
        tau2=Limit(1e-3, wants="must be positive"),
        gamma=Limit(0),
        window=Limit(2, wants="must be at least 2, as one query has no variance"),
    )

    @cached_property
    def observer(self) -> LayerStatistics:
        """Calibration of the entropy and variance of attention."""
        return AttentionSpread(self.window, self.queries)

    @property
    def min_tokens(self) -> int:
        """Sinks, the window and one more token, up to the budget of a head."""
        return min(super().min_tokens + self._fitted + 1, self.budget.head_tokens)

    @property
    def _fitted(self) -> int:
        return fit_window(self.window, self.budget.head_tokens)

    def fit(self, view: View) -> int:
        """Return the tokens of the window, equal in all layers."""
        return self._fitted

    def weigh(self, statistics: Floats) -> Floats:
        """Return the preferences of layers, float64 [..., L], scaled to a maximum of 1."""
        preference = statistics[..., 0].clip(0) ** (1 / self.tau1) * statistics[..., 1].clip(0) ** (
            1 / self.tau2
        )
        largest = preference.max(-1, keepdims=True)
        equal = np.where(largest > 0, preference / np.where(largest > 0, largest, 1), 1)
        weights: Floats = equal.clip(1e-9)
        return weights

    def divide(self, weights: Floats, tokens: int, length: int, reach: Ints) -> Ints:
        """Divide tokens among layers by `rounding`: int64 [layers], the capacity of each head."""
        if self.rounding == "exact":
            return super().divide(weights, tokens, length, reach)
        total, outside = tokens // self.spec.heads - self._fitted * self.spec.layers, length - self._fitted
        if outside <= 0 or total < len(weights):
            return super().divide(weights, tokens, length, reach)
        shares = share_officially(weights / weights.sum() * total, total, outside)
        return np.minimum(np.minimum(shares, outside) + self._fitted, reach)

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return the smoothed mean plus gamma times the variance, float32 [rows, slots]."""
        mean, variance = measure_moments(*attend_window(view, chosen))
        scores = (mean + self.gamma * variance).mean(1)
        return smooth_outside(scores, inside, "avg", self.kernel, exists=view.exists)
