"""DropKV: scores by the change of attention output if a token is evicted."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import ObservationWindow
from kvbench.methods.shared.select import Pool, find_valid_queries, smooth_outside
from kvbench.methods.shared.view import View


@dataclass
class DropKV(ObservationWindow):
    """Keep a window and the tokens whose loss changes its queries' outputs most, an even share of B in every head.

    If token j alone is evicted, the softmax over the other tokens moves the output o of a query that attends to j with
    probability p by p / (1 - p) (o - v_j). A slot's score is the squared length of this difference, summed over the
    window's queries and averaged over the query heads of a KV head (OpenReview MqfNzH3TVH; kvpress pull request 285).

    Differs from the proposal for kvpress in: it evicts once after the prompt, here eviction follows each segment, with
    SnapKV's window and smoothing, so that only the score differs from `snapkv`. Sums are float64, because p / (1 - p)
    enlarges the rounding of o - v_j where a query attends to one token only.

    Attributes:
        pool: kind of smoothing.
        epsilon: minimum of 1 - p.
    """

    pool: Pool = "max"
    epsilon: float = 1e-6

    recordable: ClassVar[bool] = True
    limits = set_limits(epsilon=Limit(0, 1, "must lie in 0..1"))
    uses_value_norms = True  # large values change the output more

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return the smoothed change of the outputs, float32 [rows, slots]."""
        asking = find_valid_queries(view, chosen)
        changes = measure_changes(view.scores(chosen), view.cached_values(), self.epsilon)
        if asking is not None:
            changes = changes.masked_fill(~asking[:, None, :, None], 0)
        scores = changes.sum(2).mean(1).float()
        return smooth_outside(scores, inside, self.pool, self.kernel, exists=view.exists)


def measure_changes(scores: Tensor, values: Tensor, epsilon: float) -> Tensor:
    """Return the squared change of each query's output if a slot is evicted, float64 [rows, G, queries, slots].

    Scores before the softmax are [rows, G query heads per KV head, queries, slots], values [rows, slots, D]; 1 - p of a
    slot is at least `epsilon`.
    """
    share, values = scores.double().softmax(-1), values.double()[:, None]
    outputs = share @ values
    distances = (
        values.square().sum(-1)[:, :, None] - 2 * outputs @ values.mT + outputs.square().sum(-1, keepdim=True)
    )
    return (share / (1 - share).clamp(min=epsilon)).square() * distances.clamp(min=0)
