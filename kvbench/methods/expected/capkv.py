"""CapKV: ridge leverage of values, weighted by the alignment of keys with an anchor query."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.core.config import ConfigError
from kvbench.methods.expected.queries import average_rotation, read_queries, rotate_channels
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_leading, split_even_odd
from kvbench.methods.shared.uses import SOLVED_BY_LIBRARY
from kvbench.methods.shared.view import View

REGULARISER = 1e-6
"""Added to the weight of each value in A, as in kvpress."""
MAX_FLOAT32_SLOTS = 4096
"""Maximum slots of a row for a float32 matrix A; it is float64 above."""


@dataclass
class CapKV(Scored):
    """Keep the tokens whose values have the highest weighted leverage, an even share of B in every head.

    The anchor of a query head is the mean of the newest segment's queries before rotation, turned by the mean rotation
    of the positions to come. A slot's weight w is exp(tau (c - max c)), c the cosine of its key and the anchor, and its
    score w v A^-1 v, where A is the identity plus the weighted sum of the outer products of values
    (arXiv:2604.25975; kvpress). Query heads of a KV head are averaged. The first tokens (`leading`, 4 in the program)
    are kept, and are outside the anchor and A.

    Differs from the program in: eviction happens once per segment, with the queries of that segment; with
    `asked=prompt` the prompt is scored once, as there, and later tokens are evicted after the prompt's, the oldest
    first. The positions to come end with the generation; in next-scale models they are the next scale's.

    Attributes:
        tau: sharpness of the weights.
        normalise: whether c is a cosine; otherwise the product of key and anchor, without the shift by its maximum, as
            in the paper. The exponential then overflows easily.
        anchor: `future` rotates the anchor as described, an addition of the program; `plain` does not.
        future: number of positions over which rotations are averaged.
        asked: score after `every` segment, or the `prompt` only.
    """

    tau: float = 5.0
    normalise: bool = True
    anchor: Literal["future", "plain"] = "future"
    future: int = 512
    asked: Literal["prompt", "every"] = "every"

    limits = set_limits(tau=Limit(0), future=Limit(1))
    graph_obstacle = SOLVED_BY_LIBRARY  # each query head solves a linear system
    uses_value_norms = True  # leverage grows with the norm of values

    def score(self, view: View) -> Tensor:
        """Return the leverage of each value times its weight, 0 for the first tokens: float32 [rows, slots]."""
        outside = (view.position >= 0) & ~find_leading(view, self.leading)
        keys, anchor = self._align(view)
        values = view.cached_values() * outside[..., None]
        weights = self._weigh(keys, anchor, outside)
        try:
            scores = [weight * measure_ridge_leverage(values, weight) for weight in weights.unbind(1)]
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            if self.normalise:
                raise
            raise self._overflow from None
        return torch.stack(scores).mean(0)

    @property
    def _overflow(self) -> ConfigError:
        return ConfigError(
            f"method.normalise=false: weights overflow at method.tau={self.tau}; lower tau or set normalise=true"
        )

    def _align(self, view: View) -> tuple[Tensor, Tensor]:
        """Return keys, float32 [rows, slots, D], and anchors [rows, query heads, D] with channels in the same order."""
        queries, valid = read_queries(view, self.spec, self.leading)
        weight = (
            torch.ones_like(queries[..., 0]) if valid is None else valid.float().expand(queries.shape[:3])
        )
        anchor = (queries * weight[..., None]).sum(2) / weight.sum(2).clamp(min=1)[..., None]
        anchor, keys = anchor / self.spec.logit_scale, view.cached_keys().float()
        rotation = average_rotation(view, self.spec, self.future)
        if rotation is None:
            return keys, anchor
        return split_even_odd(keys), rotate_channels(anchor, rotation) if self.anchor == "future" else anchor

    def _weigh(self, keys: Tensor, anchor: Tensor, outside: Tensor) -> Tensor:
        """Return the weight of each slot, 0 for slots that are not `outside`: float32 [rows, query heads, slots]."""
        if not self.normalise:
            weights = torch.exp(self.tau * (anchor @ keys.mT)).masked_fill(~outside[:, None], 0)
            if not bool(weights.isfinite().all()):
                raise self._overflow
            return weights
        cosine = normalize(anchor, dim=-1) @ normalize(keys, dim=-1).mT
        cosine = cosine.clamp(-1, 1).masked_fill(~outside[:, None], -torch.inf)
        highest = cosine.amax(-1, keepdim=True).clamp(min=-1)
        return torch.exp(self.tau * (cosine - highest)).masked_fill(~outside[:, None], 0)


def measure_ridge_leverage(values: Tensor, weight: Tensor) -> Tensor:
    """Return v A^-1 v of each value for A = I + sum (weight + 1e-6) v v^T, float32 [rows, slots].

    Values [rows, slots, D] of zero do not count; `weight` is float32 [rows, slots].
    """
    dtype = torch.float64 if values.shape[1] > MAX_FLOAT32_SLOTS else torch.float32
    values, weight = values.to(dtype), weight.to(dtype) + REGULARISER
    identity = torch.eye(values.shape[-1], dtype=dtype, device=values.device)
    factor = torch.linalg.cholesky(identity + (values * weight[..., None]).mT @ values)
    return torch.linalg.solve_triangular(factor, values.mT, upper=False).square().sum(1).float()
