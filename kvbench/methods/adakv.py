"""AdaKV: SnapKV's choice, with the heads of a layer competing for its capacity."""

from dataclasses import dataclass

from kvbench.methods.shared.scored import AdaptiveHeads, WindowAttention


@dataclass
class AdaKV(AdaptiveHeads, WindowAttention):
    """Keep what SnapKV would, but let the heads of each layer and sequence compete for the layer's even share of B.

    A layer's best slots stay, whichever head they are of: a head whose attention is spread keeps more than one that
    attends to few (arXiv:2407.11550). Every head is sure of the best slots of a share of its capacity.

    Differs from the paper in: the window is that of `snapkv`, and the sinks stay.
    """
