"""Hooks of a method that only some methods need; `Uses` names the ones that the engine calls."""

from collections.abc import Sequence

from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.methods.shared.precision import Precision
from kvbench.methods.shared.view import View


class Hooks:
    """What the engine calls besides `Method.keep` if `Method.uses` says so."""

    def compares_keys(self, layer: int, segment: Segment) -> bool:
        """Return whether `keep` may read the keys of `segment` after the next one; called after `keep`.

        Only if `uses.previous_keys`.
        """
        return True

    def select_attended(self, view: View) -> Tensor | None:
        """Select the slots to attend to, the segment's own among them: bool [rows, slots]; None selects all.

        Only if `uses.sparse_reads`. The cache calls it for each segment whose tokens come at once, and for each token
        of a next-token model that comes by itself; the view then ends with that token, whose query is the last. A
        prompt attends to all of itself. Slots that are not selected stay in the cache unless `keep`, which is called
        afterwards, drops them.
        """
        raise NotImplementedError

    def compare_layers(self, views: Sequence[View]) -> None:
        """Look at all layers, in order, before `keep` is called for one after the other.

        Only if `uses.joint`. Tokens of the segment are pending in all layers until then, as during the segment.
        """
        raise NotImplementedError

    def precisions(self, layer: int, segment: Segment) -> Sequence[Precision] | None:
        """Return the precision in which each KV head of a layer stores a segment; None uses the run's `cache_dtype`.

        Only if `uses.precisions`.
        """
        raise NotImplementedError
