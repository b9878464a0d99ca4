"""CriticalKV: half of what stays by another method's score, the rest by its product with the norm of the output."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.methods.shared.base import SHARE, Limit, set_limits
from kvbench.methods.shared.output_norms import measure_output
from kvbench.methods.shared.select import choose_best, spread_capacity
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass
class Critical(Wrapper):
    """Keep some slots by the base's score, the rest by score times the norm of what a slot adds to the output.

    The L1 distance of attention's output to that of the full cache is bounded by weights times ||W_o v||_1
    (arXiv:2502.03805). Each head keeps as many slots as under the base: the share `first` of best score are certain,
    with what never leaves among them, and the others are those of highest (score + epsilon) x ||W_o v||_1, the mean
    over the query heads that share a KV head. Around AdaKV (`method.base=adakv`) the heads of a layer first compete for
    its slots, and those that a head is sure of are certain: CriticalAdaKV.

    Differs from the program in: a gate behind W_o, of VAR and Infinity, is left out, as is its bias; the heads of a
    sequence compete among themselves in any batch. Around a score that contains the norm of values it would count twice
    and is refused (`norm=none` of expected_attention); HACK++, whose structural heads have one, is not. Scores below 0
    would prefer small norms: the base should score by attention. Of a model that does not tell W_o the value's own norm
    counts.

    Attributes:
        first: share of a head's slots that are certain.
        epsilon: what is added to a score before it is multiplied.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    limits = set_limits(first=SHARE, epsilon=Limit(0))

    def __post_init__(self) -> None:
        """Refuse a base whose score contains the norm of values.

        Raises:
            ConfigError: it does.
        """
        super().__post_init__()
        if self.base.uses_value_norms:
            raise ConfigError(
                f"method.base: the score of {type(self.base).__name__} contains the norm of values already; choose "
                "another base, or method.base.norm=none where it has that setting"
            )

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the certain slots, and of the rest those of highest product."""
        kept = super().choose(view, ranked) & (ranked > -torch.inf)
        capacity = spread_capacity(self.share(view.layer, view.segment), view)
        share = self.guaranteed_share
        safe = int(share * capacity) if isinstance(capacity, int) else (share * capacity.double()).long()
        return choose_critical(
            ranked, measure_output(view, 1), kept.sum(1), self.first, epsilon=self.epsilon, safe=safe
        )


def choose_critical(
    scores: Tensor, norms: Tensor, count: Tensor, first: float, *, epsilon: float, safe: int | Tensor = 0
) -> Tensor:
    """Choose slots of every row in two stages; returns bool [rows, slots].

    Args:
        scores: [rows, slots]; what is infinite, or the largest float32, is certain, -inf is never chosen.
        norms: float32 [rows, slots], of what each slot adds to the output.
        count: int64 [rows], slots to choose.
        first: share of them that the score decides, at least one slot unless it is 0.
        epsilon: added to a score before it is multiplied.
        safe: slots that the score decides at least, one number or int64 [rows].
    """
    exists, lasting = scores > -torch.inf, scores >= torch.finfo(torch.float32).max
    decided = (first * count.double()).long().clamp(min=1 if first > 0 else 0)
    decided = torch.maximum(decided, lasting.sum(1)).clamp(min=safe)
    decided = torch.minimum(decided, count)
    certain = choose_best(scores, decided) & exists
    product = (scores.clamp(max=torch.finfo(torch.float32).max) + epsilon) * norms
    return (
        choose_best(product.masked_fill(certain, torch.inf).masked_fill(~exists, -torch.inf), count) & exists
    )
