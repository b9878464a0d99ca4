"""Record of what a method or an observer needs from the engine."""

from dataclasses import dataclass

SOLVED_BY_LIBRARY = "the library that solves the systems of leverage may wait for the device"
"""Obstacle of methods whose scores solve linear systems, `Method.graph_obstacle`."""


@dataclass(frozen=True)
class Uses:
    """Parts of the engine that a method or an observer uses; the cache reads them once, when it is made.

    Most methods need none of them. An observer may use `previous_keys` and `codebooks` only.

    Attributes:
        state: number of values per slot in `View.state`, which is [rows, slots, state] above 1.
        last_segment: `keep` is also called after the last segment, where its result is ignored.
        previous_keys: `keep` reads `View.previous_keys` wherever `Method.compares_keys` returns True.
        sparse_reads: `Method.select_attended` selects the slots that a segment attends to; otherwise it attends to all.
            Such a method is neither static nor has a bias.
        joint: `Method.compare_layers` is called with all layers of a segment before `keep`. Next-token models only.
        precisions: `Method.precisions` sets the bits of every stored block. Static methods only.
        replaces: `keep` may change the contents of slots (`View.replace`), which low-bit storage refuses.
        bias: each slot has a bias that is added to its scores. Keys, values and queries get `BIAS_CHANNELS` more
            channels, and `View.logits` of raw queries is not available.
        lse_queries: number of last queries of a segment whose log-sum-exp the ledger records before and after a drop.
        codebooks: an observer calls `View.read_back`, so static codebooks are calibrated before it runs.
    """

    state: int = 0
    last_segment: bool = False
    previous_keys: bool = False
    sparse_reads: bool = False
    joint: bool = False
    precisions: bool = False
    replaces: bool = False
    bias: bool = False
    lse_queries: int = 0
    codebooks: bool = False
