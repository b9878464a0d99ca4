"""R-KV: tokens that matter and that no other key repeats (arXiv:2505.24133)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.base import View
from kvbench.methods.scored import Windowed
from kvbench.methods.select import average_attention, find_asking, smooth


@dataclass
class RKV(Windowed):
    """Keep a window of the segment and the earlier tokens of best lambda I - (1 - lambda) R, an even share of B a head.

    I is the attention from the window's queries, softmax over what lies outside the window, maximum over neighbours. R
    says how much the other keys repeat a key: softmax over the slots of its mean cosine similarity to them, where every
    key's latest near copies count as different, so that one of several copies stays.

    Differs from the paper in: it compresses text every 128 tokens; here every segment ends with a selection, as
    SnapKV's on the grid over the current map (8 last tokens in the paper). The released code protects one near copy,
    not beta, and takes the first sequence's similarities for all; here each head of each sequence has its own. The
    paper protects no sinks.

    Attributes:
        mix: lambda; 1 leaves SnapKV's score.
        threshold: cosine similarity above which two keys are near copies.
        protected: latest near copies of every key that count as different (beta).
        kernel: width of the maximum in slots, odd; 1 for none.
    """

    mix: float = 0.1
    threshold: float = 0.5
    protected: int = 1
    kernel: int = 7

    revision: ClassVar[int] = 2  # slots that a row has not were its slots' neighbours

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings out of range, and what `Windowed` refuses."""
        if not 0 <= self.mix <= 1:
            raise ValueError(f"method.mix={self.mix}: must lie in 0..1")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"method.threshold={self.threshold}: is a cosine and must lie in -1..1")
        if self.protected < 0:
            raise ValueError(f"method.protected={self.protected}: must be at least 0")
        super().check(spec, budget)

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return lambda I - (1 - lambda) R, float32 [rows, slots]."""
        scores, asking = view.scores(chosen), find_asking(view, chosen)
        attention = average_attention(scores, inside, softmax="prefix", group="max", asking=asking)
        keys, exists = view.cached_keys(), view.position >= 0
        few = max(1, 2**26 // keys.shape[1] ** 2)  # the similarities of all rows at once may not fit
        parts = zip(keys.split(few), exists.split(few), strict=True)
        repeated = [measure_redundancy(*part, self.threshold, self.protected) for part in parts]
        attention = smooth(attention, "max", self.kernel, self.uneven(view))
        return self.mix * attention - (1 - self.mix) * torch.cat(repeated)


def measure_redundancy(keys: Tensor, exists: Tensor, threshold: float, protected: int) -> Tensor:
    """Measure how much other keys repeat each key; returns float32 [rows, slots], of which each row sums to 1.

    Args:
        keys: [rows, slots, D], in order of position, zeros where a row has no such slot.
        exists: bool [rows, slots], which slots a row has; the others have 0.
        threshold: cosine similarity above which keys are near copies.
        protected: latest near copies of every key whose similarity to it counts as 0.
    """
    unit = F.normalize(keys.float(), dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    similarity.diagonal(dim1=1, dim2=2).zero_()
    near = similarity > threshold
    later = near.flip(2).cumsum(2, dtype=torch.int32).flip(2)  # near copies from this one to the latest
    total = similarity.masked_fill(near & (later <= protected), 0).sum(1)
    mean = total / exists.sum(1, keepdim=True)
    return mean.masked_fill(~exists, -torch.inf).softmax(-1)
