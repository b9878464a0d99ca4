"""View: the data of one layer that a method may read right after a segment ran."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvbench.core.segments import Segment


class View(Protocol):
    """One layer right after a segment ran.

    Rows are (sequence, KV head), sequence-major: row = sequence x heads + head; sequences are all conditional prompts,
    then their unconditional twins. Slots are the cached tokens followed by those of the current segment, in position
    order. Queries are numbered within the current segment, 0 to segment.length - 1.

    Attributes:
        layer: index of the layer.
        segment: the current segment.
        sequences: sequences in the batch.
        heads: KV heads of a sequence.
        position: int64 [rows, slots], position of each token, -1 where the row has no such slot.
        segment_ids: int64 [rows, slots], index of the segment the token came from, -1 where empty.
        prompts: number of every sequence's prompt in the run, so that what is drawn at random is the same in any batch.
        state: float32 [rows, slots], or [rows, slots, n] of a method with n numbers per slot: what a `Stateful` method
            wrote on each slot earlier, 0 on new ones; written in place, it moves with the slots that are kept.
        padding: int64 [rows], tokens in front of each row's prompt that do not exist, where prompts of a batch are not
            equally long; else None. In the prompt's segment they have no slot (-1), receive nothing, and means over
            queries leave them out.
        padding_charge: int64 [rows], tokens of each row's capacity that padding uses where it counts as held; else
            None.
    """

    layer: int
    segment: Segment
    sequences: int
    heads: int
    position: Tensor
    segment_ids: Tensor
    prompts: Sequence[int]
    state: Tensor
    padding: Tensor | None
    padding_charge: Tensor | None

    def mass(self, queries: Tensor | None = None, *, power: int = 1) -> Tensor:
        """Return the mean attention that each slot receives, float32 [rows, slots].

        Args:
            queries: int64 [n], over which the mean is taken; None takes all.
            power: of each query's attention, 1 or 2, before the mean.
        """
        ...

    def scores(self, queries: Tensor) -> Tensor:
        """Return scaled q k^T of a few queries, float32 [rows, query heads per KV head, queries, slots].

        It is -inf where a row has no such slot, so that a softmax over the last dimension gives attention, and all of
        it where a row has no such query (`select.find_valid_queries`).

        Args:
            queries: int64 [n].
        """
        ...

    def queries(self, chosen: Tensor, *, rotated: bool = True) -> Tensor:
        """Return a few queries, scaled, float32 [rows, query heads per KV head, n, D]: `scores` are theirs with keys.

        Args:
            chosen: int64 [n].
            rotated: after the rotation by position; else without it, as in `keys`.
        """
        ...

    def rotation(self, positions: Tensor) -> Tensor | None:
        """Return the RoPE factors of positions int64 [...], complex64 [..., D/2]; None without RoPE or if not exposed.

        A factor rotates two neighbouring channels.
        """
        ...

    def logits(self, queries: Tensor, *, raw_queries: bool = False) -> Tensor:
        """Return `scores` summed over the chosen queries, float32 [rows, slots], at the cost of one query.

        Args:
            queries: int64 [n].
            raw_queries: take q as projected, before bias, norm, learned scale and rotation, and 1/sqrt(D) for the
                scale.
        """
        ...

    def keys(self, *, rotated: bool = True) -> Tensor:
        """Return the current segment's keys, [rows, segment.length, D].

        Args:
            rotated: after the rotation by position; else without it, as keys are stored in few bits, with the even
                channels first, if the model exposes its rotation.
        """
        ...

    def values(self) -> Tensor:
        """Return the current segment's values, [rows, segment.length, D]."""
        ...

    def read_back(self, keys: Tensor, values: Tensor, segment: Segment, bits: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as attention would read them out of static codebooks.

        Both are [rows, segment.length, D]. Only an observer that `ReadsCodebooks` may call it. The codebooks were
        fitted to other prompts than the one that is shown.

        Args:
            keys: of all tokens of a segment, [rows, segment.length, D].
            values: shaped like keys.
            segment: the segment.
            bits: of a number, as a `Precision` has them.
        """
        ...

    def cached_keys(self, *, rotated: bool = True) -> Tensor:
        """Return the keys of all slots, cached and current, [rows, slots, D]; zeros where a row has no such slot.

        Args:
            rotated: after the rotation by position; else without it, as in `keys`.
        """
        ...

    def cached_values(self) -> Tensor:
        """Return the values of all slots, as `cached_keys` does their keys."""
        ...

    def value_norms(self) -> Tensor:
        """Return the Euclidean norm of each slot's value, float32 [rows, slots]; 0 where a row has no such slot."""
        ...

    def output_projection(self) -> Tensor | None:
        """Return W_o of each query head, [heads, query heads per KV head, width, D], as the model computes with it.

        It maps a query head's attention output [D] to what it adds to the residual stream [width], before any bias or
        gate. None if the model does not tell it.
        """
        ...

    def bias(self) -> Tensor:
        """Return what is added to all scores of each slot, float32 [rows, slots] in nats, of a method with a bias."""
        ...

    def replace(self, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Give slots other contents: those that `keep` then keeps are stored with them, at the positions they have.

        Not in the last segment, where nothing is kept.

        Args:
            keys: [rows, slots, D], shaped like `cached_keys`; of slots that are not kept they do not matter.
            values: shaped like `keys`.
            bias: float32 [rows, slots] in nats, of a biased method (`ReplacesContents.biased`) and of it only.
        """
        ...

    def previous_keys(self) -> Tensor:
        """Return the keys of the segment before, [rows, tokens, D], also of tokens that left the cache since.

        Only a method that `ComparesKeys` may call it, and not at segment 0.
        """
        ...
