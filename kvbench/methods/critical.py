"""CriticalKV: half of the slots by another method's score, the rest by its product with the norm of the output."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.methods.shared.grouped import count_safe
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.utility import measure_output
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass
class Critical(Wrapper):
    """Keep some slots by the base's score, the rest by the score times the norm of the slot's output contribution.

    The L1 distance of attention's output to the full cache's output is bounded by attention weights times ||W_o v||_1
    (arXiv:2502.03805). Each head keeps as many slots as under the base. A share `first` is chosen by score, including
    slots that are never evicted; the other slots have the highest (score + epsilon) x ||W_o v||_1, a mean over the
    query heads that share a KV head. Around AdaKV (`method.base=adakv`) the heads of a layer first compete for its
    slots, and the slots guaranteed to a head are chosen by score: CriticalAdaKV.

    Differs from the program in: the gate after W_o (VAR, Infinity) and the bias are left out; heads compete within
    their own sequence in any batch. A base whose score contains the norm of values is refused, because the norm would
    count twice (expected_attention: set `norm=none`); HACK++, whose structural scores contain it, is accepted. Scores
    below 0 would prefer small norms, so the base should score by attention. The value's own norm is used if a model
    does not expose W_o.

    Attributes:
        first: share of a head's slots that are chosen by score.
        epsilon: added to a score before it is multiplied.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    recordable: ClassVar[bool] = True
    limits = set_limits(first=SHARE, epsilon=Limit(0))

    def __post_init__(self) -> None:
        """Refuse a base whose score contains the norm of values (ConfigError)."""
        super().__post_init__()
        if self.base.uses_value_norms:
            raise ConfigError(
                f"method.base: the score of {type(self.base).__name__} contains the norm of values; choose "
                "another base, or method.base.norm=none if it has that setting"
            )

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select slots by score, and then by score x norm: bool [rows, slots]."""
        mask = super().select_slots(view, ranked) & (ranked > -torch.inf)
        capacity = self.row_capacities(view)
        if isinstance(capacity, int):
            capacity = torch.full_like(ranked[:, 0], capacity, dtype=torch.int64)
        safe = count_safe(self.guaranteed_share, capacity)
        return choose_critical(
            ranked, measure_output(view, 1), mask.sum(1), self.first, epsilon=self.epsilon, safe=safe
        )


def choose_critical(
    scores: Tensor, norms: Tensor, count: Tensor, first: float, *, epsilon: float, safe: int | Tensor = 0
) -> Tensor:
    """Choose `count` slots of each row, int64 [rows], in two stages: bool [rows, slots].

    Scores [rows, slots] of infinity or the largest float32 are always chosen, -inf never. The share `first` of the
    slots, at least one unless it is 0 and at least `safe` (an int or int64 [rows]), are chosen by score. Other slots
    have the highest (score + epsilon) x norm. Norms of contributions to the output are float32 [rows, slots].
    """
    largest = torch.finfo(torch.float32).max
    exists, permanent = scores > -torch.inf, scores >= largest
    by_score = (first * count.double()).long().clamp(min=1 if first > 0 else 0)
    by_score = torch.minimum(torch.maximum(by_score, permanent.sum(1)).clamp(min=safe), count)
    certain = choose_best(scores, by_score) & exists
    product = ((scores.clamp(max=largest) + epsilon) * norms).masked_fill(certain, torch.inf)
    return choose_best(product.masked_fill(~exists, -torch.inf), count) & exists
