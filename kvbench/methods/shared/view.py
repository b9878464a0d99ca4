"""View: the data of one layer that a method may read right after a segment ran."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvbench.core.segments import Segment


class View(Protocol):
    """One layer right after a segment ran; D is the head dim.

    Rows are (sequence, KV head), sequence-major: row = sequence x heads + head; all conditional sequences come first,
    then the unconditional ones. Slots are the cached tokens followed by the current segment's, in position order.
    Queries are numbered within the current segment, 0 to segment.length - 1.

    Attributes:
        layer: index of the layer.
        segment: the current segment.
        sequences: number of sequences in the batch.
        heads: KV heads of a sequence.
        position: int64 [rows, slots], position of each slot's token, -1 where a row lacks the slot.
        prompts: index in the run of each sequence's prompt, so that random values are the same in any batch.
        state: float32 [rows, slots], or [rows, slots, n] for n values per slot (`Uses.state`): what the method wrote
            on each slot earlier, 0 on new slots; written in place, it moves with the kept slots.
        padding: int64 [rows], padding tokens in front of each row's prompt; None if all prompts are equally long. In
            the prompt's segment they have no slot (-1), receive no attention and are excluded from means over queries.
        padding_charge: int64 [rows], tokens of each row's capacity that padding uses; None unless padding counts as
            held.
        prompt_lengths: tokens of each sequence's prompt, on the host; empty if all prompts are equally long.
    """

    layer: int
    segment: Segment
    sequences: int
    heads: int
    position: Tensor
    prompts: Sequence[int]
    state: Tensor
    padding: Tensor | None
    padding_charge: Tensor | None
    prompt_lengths: Sequence[int]

    @property
    def segment_ids(self) -> Tensor:
        """Index of the segment of each slot's token, int64 [rows, slots], -1 where a row lacks the slot."""

    @property
    def exists(self) -> Tensor | None:
        """Whether each row has each slot, bool [rows, slots]; None if all rows have all slots."""

    def mass(self, queries: Tensor | None = None, *, power: int = 1) -> Tensor:
        """Return the mean attention that each slot receives, float32 [rows, slots].

        Args:
            queries: int64 [n], indices of the queries in the mean; None for all.
            power: 1 or 2, applied to each query's attention before the mean.
        """

    def scores(self, queries: Tensor) -> Tensor:
        """Return scaled q k^T of a few queries, float32 [rows, query heads per KV head, n, slots].

        Scores are -inf for slots that a row lacks or a query does not see, so that a softmax over the last dimension
        gives attention. All scores of a query that a row lacks are -inf (`select.find_valid_queries`).

        Args:
            queries: int64 [n], indices of queries.
        """

    def queries(self, chosen: Tensor, *, rotated: bool = True) -> Tensor:
        """Return a few queries, scaled as for `scores`, float32 [rows, query heads per KV head, n, D].

        Args:
            chosen: int64 [n], indices of queries.
            rotated: whether the rotation by position is applied, see `keys`.
        """

    def rotation(self, positions: Tensor) -> Tensor | None:
        """Return RoPE factors, complex64 [..., D/2], of positions int64 [...]; None without RoPE or if not exposed.

        A factor rotates two neighbouring channels.
        """

    def logits(self, queries: Tensor, *, raw_queries: bool = False) -> Tensor:
        """Return scores summed over queries and query heads, float32 [rows, slots]; keys unseen by a query add 0.

        It costs one query if all queries see all keys. Where a row lacks the slot, the sum is undefined.

        Args:
            queries: int64 [n], indices of queries.
            raw_queries: use q as projected, before bias, norm, learned scale and rotation, and the scale 1/sqrt(D).

        Raises:
            ValueError: the model does not expose raw queries.
        """

    def keys(self, *, rotated: bool = True) -> Tensor:
        """Return the current segment's keys, [rows, segment.length, D], in the model's compute dtype.

        Args:
            rotated: whether the rotation by position is applied. If not, and if the model exposes its rotation, keys
                are float32 and have even channels first, then odd ones, as in low-bit storage.
        """

    def values(self) -> Tensor:
        """Return the current segment's values, [rows, segment.length, D], in the model's compute dtype."""

    def read_back(self, keys: Tensor, values: Tensor, segment: Segment, bits: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as decoded from static codebooks, [rows, segment.length, D], in the dtype of `keys`.

        Only an observer with `Uses.codebooks` may call it. The codebooks were fitted to other prompts.

        Args:
            keys: keys of all tokens of a segment, [rows, segment.length, D].
            values: values, shaped like `keys`.
            segment: the segment.
            bits: bits per value, see `Precision`.
        """

    def cached_keys(self, *, rotated: bool = True) -> Tensor:
        """Return the keys of all slots, [rows, slots, D], in the dtype of `keys`; 0 where a row lacks the slot.

        Args:
            rotated: whether the rotation by position is applied, see `keys`.
        """

    def cached_values(self) -> Tensor:
        """Return the values of all slots, [rows, slots, D], in the dtype of `values`; 0 where a row lacks the slot."""

    def value_norms(self) -> Tensor:
        """Return the Euclidean norm of each slot's value, float32 [rows, slots]; 0 where a row lacks the slot."""

    def value_ranges(self) -> Tensor:
        """Return max - min of the channels of each slot's value, float32 [rows, slots]; 0 where a row lacks it."""

    def output_projection(self) -> Tensor | None:
        """Return W_o of each query head, [heads, query heads per KV head, width, D], in the model's compute dtype.

        It maps a query head's attention output [D] to its part of the residual stream [width], before any bias or
        gate. None if the model does not expose it.
        """

    def bias(self) -> Tensor:
        """Return the bias of each slot, float32 [rows, slots], in nats; only with `Uses.bias`."""

    def replace(self, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Replace the contents, but not the positions, of the slots that `keep` then keeps.

        It requires `Uses.replaces`, and must not be called in the last segment, which is not stored.

        Args:
            keys: [rows, slots, D], shaped like `cached_keys`; arbitrary for slots that are not kept.
            values: shaped like `keys`.
            bias: float32 [rows, slots] in nats, with `Uses.bias` and only then.
        """

    def count_unprotected(self, slots: Tensor) -> None:
        """Count slots of score +inf that are dropped because a row's capacity is smaller.

        A run reports the sum (`protected_drops` in samples.jsonl).

        Args:
            slots: bool [rows, slots], the dropped slots.
        """

    def previous_keys(self) -> Tensor:
        """Return the keys of all tokens of the previous segment, evicted ones too, [rows, tokens, D], rotated.

        It requires `Uses.previous_keys`, and is refused at segment 0.
        """
