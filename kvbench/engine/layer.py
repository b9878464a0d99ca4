"""Storage of one layer, and the inputs of its attention in one segment.

Shapes: B sequences that share a layout, R rows of the layout, S sequences, H KV heads, Q queries, T tokens, D channels.
B = S and R = H if all sequences hold the same slots; otherwise B = 1 and R = S x H.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvbench.engine.coding.formats import CodebookTensors
from kvbench.engine.coding.planes import count_rows
from kvbench.kernels.decode_attention import DecodeRows
from kvbench.kernels.joined_rows import JoinedRows
from kvbench.kernels.layout import Layout, Past, RowOffsets


@dataclass(kw_only=True)
class LayerState:
    """Data of one layer that is stored in addition to keys and values.

    Attributes:
        state: float32 [R, longest, ...], the method's values per slot; None without `Uses.state`.
        previous_keys: keys of the previous segment [S, H, T, D]; None without `Uses.previous_keys`.
        queries: queries [S, H, query heads per KV head, T, D] of a segment that is not full yet; None for a static
            method.
        filled: tokens of the unfinished segment so far.
    """

    state: Tensor | None = None
    previous_keys: Tensor | None = None
    queries: Tensor | None = None
    filled: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the state, the previous keys and the queries."""
        return sum(x.nbytes for x in (self.state, self.previous_keys, self.queries) if x is not None)

    def add_queries(self, q: Tensor, tokens: int, length: int, filled: Tensor) -> Tensor:
        """Store the queries of a step; return all queries of the segment, [S, H, Q, D].

        Args:
            q: queries of the step [S, H, Q, D]; `self.filled` counts its tokens already.
            tokens: tokens of the step.
            length: tokens of the segment.
            filled: int64 [1] on the device, tokens of the segment before the step.
        """
        new = q.unflatten(2, (-1, tokens))
        if self.queries is None:
            self.queries = q.new_empty(*new.shape[:3], length, q.shape[3])
        if tokens == 1:
            self.queries.index_copy_(3, filled, new)
        else:
            self.queries[:, :, :, self.filled - tokens : self.filled] = new
        return self.queries.flatten(2, 3)


@dataclass
class LayerStore(LayerState):
    """One layer's keys and values, [B, capacity, D], and the layout of their rows.

    Attributes:
        layout: layout of the rows in both; tokens of a segment that is not full are in the free slots behind each row.
        keys: stored keys.
        values: stored values.
        handles: handles by which the arena releases keys and values.
        rows: views of the storage for the steps of a segment; None before the first step.
        placed: offsets of the rows for the one-token kernel; None without the kernel.
        joined: on a CPU, cached slots joined with those of a segment whose tokens came at once; otherwise None.
    """

    layout: Layout
    keys: Tensor
    values: Tensor
    handles: tuple[int | None, int | None] = (None, None)
    rows: DecodeRows | None = None
    placed: RowOffsets | None = None
    joined: JoinedRows | None = None

    @property
    def past(self) -> Past:
        """Stored keys and values in the form that kernels take."""
        return Past(self.keys, self.values, self.layout, self.joined)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's keys and values, of all sequences that share the layout."""
        batch, _, channels = self.keys.shape
        return 2 * batch * channels * self.keys.element_size()

    @property
    def bytes(self) -> int:
        """Bytes of the stored keys and values, without free slots for pending tokens."""
        return self.layout.total * self.slot_bytes

    def count_sequence_bytes(self, heads: int, branches: int) -> list[int]:
        """Return the bytes of keys and values of each sequence, or a single value common to all.

        Args:
            heads: KV heads of the layer.
            branches: sequences of a prompt.
        """
        size = self.slot_bytes // self.keys.shape[0]  # bytes of a slot of one sequence, without remainder
        return count_rows([count * size for count in self.layout.counts], heads)

    def count_read_bytes(self, heads: int) -> list[int]:
        """Return the bytes that attention to all slots of a sequence reads, shaped like `count_sequence_bytes`."""
        return self.count_sequence_bytes(heads, 1)


class LayerInputs(NamedTuple):
    """Inputs of one layer's attention in the current segment.

    Attributes:
        layer: index of the layer.
        q: queries [S, H, Q, D]; the query heads of one KV head follow each other along Q.
        k: the segment's keys [S, H, T, D].
        v: the segment's values, shaped like k.
        store: the layer's storage before the segment is stored.
        scale: factor on q k^T.
        causal: whether a query sees the segment's keys up to its own token only.
        lse: float32 [S, H, Q], log-sum-exp of the scores; None if attention has not computed it.
        raw_queries: returns the queries as projected, shaped like q; None if the model does not expose them.
        biased: whether q, k, v and the storage are widened by a bias (`engine/bias.py`).
        projection: returns the output projection of a layer, [width, query heads x D]; None if the model does not
            expose it.
        rotation: RoPE factors, complex64 [positions, D/2]; None without RoPE or if the model does not expose them.
        codebooks: static codebooks of all layers, for an observer or the storage.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    store: LayerStore
    scale: float
    causal: bool = False
    lse: Tensor | None = None
    raw_queries: Callable[[], Tensor] | None = None
    biased: bool = False
    projection: Callable[[int], Tensor | None] | None = None
    rotation: Tensor | None = None
    codebooks: CodebookTensors | None = None
