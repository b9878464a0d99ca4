"""R-KV: scores of attention minus redundancy of keys (arXiv:2505.24133)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.redundancy import measure_redundancy
from kvbench.methods.shared.scored import ObservationWindow
from kvbench.methods.shared.select import average_attention, find_sinks, find_valid_queries, smooth
from kvbench.methods.shared.view import View


@dataclass
class RKV(ObservationWindow):
    """Keep a window and the earlier tokens of highest lambda I - (1 - lambda) R, an even share of B in every head.

    I is the attention from the window's queries, with a softmax over slots outside the window and a maximum over
    neighbours. R is the redundancy of a key: the softmax over slots of its mean cosine similarity to the other keys.
    The latest near copies of each key count as different, so that one of several copies is kept.

    Differs from the paper in: the paper compresses text every 128 tokens; here eviction follows each segment, with
    SnapKV's window, a grid over the current map (8 last tokens in the paper). The released code protects one near copy
    instead of beta and takes the first sequence's similarities for all; here each head of each sequence has its own.
    The paper protects no sinks.

    Attributes:
        mix: lambda; 1 is SnapKV's score.
        threshold: cosine similarity above which two keys are near copies.
        protected: latest near copies of each key that count as different (beta).
        normalize: R is a softmax; otherwise the mean similarity, as in the R-KV of Hard-KV's program.
        similarity: compute attention and similarity over `all` slots, or over the `middle` between sinks and window, as
            in TriAttention's comparison with a protected prompt.
        kernel: width of the maximum in slots, odd; 1 for none.
    """

    mix: float = 0.1
    threshold: float = 0.5
    protected: int = 1
    normalize: bool = True
    similarity: Literal["all", "middle"] = "all"
    kernel: int = 7

    recordable: ClassVar[bool] = True
    limits = set_limits(
        mix=SHARE, threshold=Limit(-1, 1, "is a cosine and must lie in -1..1"), protected=Limit(0)
    )
    revision: ClassVar[int] = 2  # before, smoothing included missing slots

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return lambda I - (1 - lambda) R, float32 [rows, slots]."""
        scores, queries = view.scores(chosen), find_valid_queries(view, chosen)
        keys, exists, valid = view.cached_keys(), view.position >= 0, view.exists
        if self.similarity == "middle":
            inside = inside | find_sinks(view, self.sinks, self.leading)
            exists = valid = exists & ~inside
            keys = keys * exists[..., None]
        attention = average_attention(scores, inside, softmax="prefix", group="max", asking=queries)
        redundancy = measure_redundancy(
            keys, exists, self.threshold, self.protected, normalize=self.normalize
        )
        attention = smooth(attention, "max", self.kernel, valid)
        return self.mix * attention - (1 - self.mix) * redundancy
