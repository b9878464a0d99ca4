"""Optional capabilities of a method: mixins that the engine recognises by their type.

A method derives from a mixin and from `Method`. Where a setting decides whether a method uses its capability, the mixin
has a property for that, and the functions at the end answer for any method.
"""

from collections.abc import Sequence
from typing import ClassVar, TypeGuard

from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.core.storage import Precision
from kvbench.methods.shared.view import View


class Stateful:
    """The method keeps numbers per slot in `View.state`.

    Attributes:
        numbers: of each slot; with more than one, `View.state` is [rows, slots, numbers].
    """

    numbers: ClassVar[int] = 1

    @property
    def stateful(self) -> bool:
        """Whether it does."""
        return True


class ObservesLast:
    """`keep` is also called at the last segment, where its answer is ignored."""

    observes_last: ClassVar[bool] = True


class ComparesKeys:
    """The method reads `View.previous_keys`."""

    def compares(self, layer: int, segment: Segment) -> bool:
        """Return whether `keep` may read the keys of `segment` once the next one ran; called after `keep`."""
        return True


class SparseReads:
    """The method selects the slots that a segment attends to; other methods attend to all.

    Such a method is neither static nor biased.
    """

    @property
    def sparse_reads(self) -> bool:
        """Whether the selection is on."""
        return True

    def select_attended(self, view: View) -> Tensor | None:
        """Select slots, the segment's own among them: bool [rows, slots]; None selects all.

        The cache calls it for each segment whose tokens come at once, and for each token of a next-token model that
        comes by itself; the view then ends with that token, whose query is the last. A prompt attends to all of itself.
        Slots that are not selected stay in the cache unless `keep`, which is called afterwards, drops them.
        """
        raise NotImplementedError


class DecidesJointly:
    """The method sees all layers of a segment before it decides about any; only next-token models have such a moment.

    After the last token of a segment the cache calls `compare`, then `keep` for one layer after the other. Tokens of
    the segment are in flight in all layers until then, as during the segment.
    """

    @property
    def jointly(self) -> bool:
        """Whether it does."""
        return True

    def compare(self, views: Sequence[View]) -> None:
        """Look at all layers, in order."""
        raise NotImplementedError


class MixedPrecision:
    """The method, which is static, sets the bits of every stored block."""

    @property
    def mixes_precisions(self) -> bool:
        """Whether it does; otherwise the run's `cache_dtype` decides."""
        return True

    def precisions(self, layer: int, segment: Segment) -> Sequence[Precision] | None:
        """Return the precision in which each KV head of a layer stores a segment; None uses the run's `cache_dtype`."""
        raise NotImplementedError


class ReplacesContents:
    """`keep` may change the contents of slots (`View.replace`), which storage in few bits refuses."""

    @property
    def replaces(self) -> bool:
        """Whether it does."""
        return True

    @property
    def biased(self) -> bool:
        """Whether slots have a bias that is added to their scores.

        Keys, values and queries get `BIAS_CHANNELS` more channels, and `View.logits` of raw queries is not available.
        """
        return False


class RecordsLse:
    """The ledger records how drops change the log-sum-exp of a segment's last queries."""

    @property
    def lse_queries(self) -> int:
        """Number of these queries; 0 records nothing."""
        raise NotImplementedError


class ReadsCodebooks:
    """The observer calls `View.read_back`, so codebooks are calibrated before it runs."""


def is_stateful(method: object) -> TypeGuard[Stateful]:
    """Return whether a method keeps a number per slot."""
    return isinstance(method, Stateful) and method.stateful


def reads_sparsely(method: object) -> TypeGuard[SparseReads]:
    """Return whether a method selects the slots that a segment attends to."""
    return isinstance(method, SparseReads) and method.sparse_reads


def decides_jointly(method: object) -> TypeGuard[DecidesJointly]:
    """Return whether a method sees all layers before it decides."""
    return isinstance(method, DecidesJointly) and method.jointly


def mixes_precisions(method: object) -> TypeGuard[MixedPrecision]:
    """Return whether a method sets the bits of every stored block."""
    return isinstance(method, MixedPrecision) and method.mixes_precisions


def replaces_contents(method: object) -> bool:
    """Return whether a method changes the contents of slots."""
    return isinstance(method, ReplacesContents) and method.replaces


def is_biased(method: object) -> bool:
    """Return whether a method's slots have a bias."""
    return isinstance(method, ReplacesContents) and method.biased


def count_lse_queries(method: object) -> int:
    """Return how many queries of a segment have their log-sum-exp recorded."""
    return method.lse_queries if isinstance(method, RecordsLse) else 0
