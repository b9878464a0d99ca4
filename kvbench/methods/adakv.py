"""AdaKV: SnapKV's score, with the heads of a layer competing for its capacity."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.shared.scored import AdaptiveHeads, WindowAttention


@dataclass
class AdaKV(AdaptiveHeads, WindowAttention):
    """Score slots as SnapKV does, and let the heads of each layer and sequence compete for the layer's even share of B.

    A layer keeps its best slots, in any of its heads: a head with spread attention keeps more than a head that
    attends to few slots (arXiv:2407.11550). Each head is guaranteed its best slots for a share of its capacity.

    Differs from the paper in: the window is `snapkv`'s, and sinks are kept.
    """

    revision: ClassVar[int] = 3  # before, no slot was safe at fewer than five tokens a head
