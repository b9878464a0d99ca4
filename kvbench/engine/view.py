"""Storage of one layer, and the view that a method gets of it right after a segment ran."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.engine.bias import attach_bias, narrow, read_bias, widen
from kvbench.engine.coding.formats import Books, read_back
from kvbench.engine.coding.planes import count_rows
from kvbench.kernels.attention_mass import attention_mass, attention_scores
from kvbench.kernels.decode_attention import DecodeRows
from kvbench.kernels.layout import Layout, Past, fold_rows, pad_rows
from kvbench.kernels.planes import unrotate


@dataclass(kw_only=True)
class LayerState:
    """Data of one layer that is stored beside keys and values.

    Attributes:
        state: float32 [rows, longest, ...], a number or more per slot, of a stateful method.
        before: keys of the segment before [batch, rows, tokens, D], of a method that compares keys.
        asked: queries [batch, rows, query heads per KV head, tokens, D] of a segment that is not full yet, of a method
            that looks at data.
        filled: tokens of that segment.
    """

    state: Tensor | None = None
    before: Tensor | None = None
    asked: Tensor | None = None
    filled: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes that the method keeps."""
        return sum(x.nbytes for x in (self.state, self.before, self.asked) if x is not None)


@dataclass
class LayerStore(LayerState):
    """One layer's storage: where its rows lie, and keys and values [batch, capacity, D].

    Attributes:
        layout: where rows lie in both; tokens of a segment that is not full lie in the free slots behind every row.
        keys: stored keys.
        values: stored values.
        tickets: what the arena wants back for keys and values.
        rows: the same storage as the steps of a segment see it, from the first step on.
    """

    layout: Layout
    keys: Tensor
    values: Tensor
    tickets: tuple[int | None, int | None] = (None, None)
    rows: DecodeRows | None = None

    @property
    def past(self) -> Past:
        """Keys and values as kernels take them."""
        return Past(self.keys, self.values, self.layout)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's keys and values, of all sequences that share the layout."""
        batch, _, channels = self.keys.shape
        return 2 * batch * channels * self.keys.element_size()

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are kept; free slots for tokens in flight are not among them."""
        return self.layout.total * self.slot_bytes

    def count_sequence_bytes(self, heads: int, branches: int) -> list[int]:
        """Return the bytes of keys and values of each sequence, one number if all have as many.

        Args:
            heads: KV heads of the layer.
            branches: sequences of a prompt.
        """
        return count_rows([count * self.slot_bytes // len(self.keys) for count in self.layout.counts], heads)


class LayerInputs(NamedTuple):
    """Inputs of one layer's attention in the current segment, in rows.

    Attributes:
        layer: index of the layer.
        q: queries [batch, rows, queries, D]; the query heads of one KV head follow each other. On CUDA rows may come as
            [sequences, heads], and so in k and v.
        k: the segment's keys [batch, rows, tokens, D].
        v: the segment's values, shaped like k.
        store: the layer's storage before the segment is stored.
        scale: factor on q k^T.
        causal: a query sees the segment's keys up to its own token, else all of them.
        lse: float32 [batch, rows, queries] as in q, log-sum-exp of the scores where attention came first.
        raw_queries: computes the queries as projected, shaped like q; None if the model does not expose them.
        biased: q, k, v and what is stored are wider by a bias (`engine/bias.py`).
        projection: returns the output projection of a layer, [width, query heads x D]; None if the model does not
            expose it.
        rotation: RoPE factors, complex64 [positions, D/2]; None without RoPE or if the model does not expose them.
        books: static codebooks of all layers, if an observer or the storage uses them.
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
    books: Books | None = None


def note_queries(store: LayerStore, q: Tensor, tokens: int, length: int, filled: Tensor) -> Tensor:
    """Store the queries of a step for the method; return those of the whole segment, [batch, rows, queries, D].

    Args:
        store: the layer's, whose `filled` counts the tokens of the step.
        q: [batch, rows, queries, D] of the step.
        tokens: of the step.
        length: tokens of the segment.
        filled: int64 [1] on the device, tokens of the segment before the step.
    """
    each = q.unflatten(2, (-1, tokens))
    if store.asked is None:
        store.asked = q.new_empty(*each.shape[:3], length, q.shape[3])
    if tokens == 1:
        store.asked.index_copy_(3, filled, each)
    else:
        store.asked[:, :, :, store.filled - tokens : store.filled] = each
    return store.asked.flatten(2, 3)


@dataclass
class CacheView:
    """One layer right after a segment, as a method sees it (see `kvbench.methods.shared.base.View`).

    Attributes:
        replaced: keys and values [rows, slots, D] given to `replace`, in stored form; None before it is called.

    Raises:
        ValueError: a static method asks for anything but positions.
    """

    layer: int
    segment: Segment
    sequences: int
    heads: int
    position: Tensor
    segment_ids: Tensor
    state: Tensor
    _given: LayerInputs | None = field(default=None, repr=False)
    prompts: Sequence[int] = ()
    padding: Tensor | None = None
    padding_charge: Tensor | None = None
    replaced: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def mass(self, queries: Tensor | None = None, *, power: int = 1) -> Tensor:
        """float32 [rows, slots]: attention each slot receives, mean over the chosen queries."""
        return self._mass(queries, power).flatten(0, 1)

    def scores(self, queries: Tensor) -> Tensor:
        """float32 [rows, query heads per KV head, queries, slots]: scaled q k^T of a few chosen queries."""
        q, scale = self._seen.q, self._seen.scale
        scores = self._scores(self._select_queries(q, queries), scale, self._tokens(q, queries))
        return scores.flatten(0, 1).unflatten(1, (-1, len(queries)))

    def queries(self, chosen: Tensor, *, rotated: bool = True) -> Tensor:
        """float32 [rows, query heads per KV head, n, D]: a few chosen queries, scaled."""
        q = self._select_queries(self._narrow(self._seen.q), chosen).flatten(0, 1).float()
        q = (q * self._seen.scale).unflatten(1, (-1, len(chosen)))
        rotation = None if rotated else self.rotation(self.segment.start + chosen)
        return q if rotation is None else unrotate(q, rotation)

    def rotation(self, positions: Tensor) -> Tensor | None:
        """complex64 [..., D/2]: RoPE factors of positions."""
        rotation = self._seen.rotation
        return None if rotation is None else rotation[positions.to(rotation.device, non_blocking=True)]

    def logits(self, queries: Tensor, *, raw_queries: bool = False) -> Tensor:
        """float32 [rows, slots]: `scores` summed over the chosen queries."""
        inputs = self._seen
        q, scale = inputs.q, inputs.scale
        if raw_queries:
            if inputs.raw_queries is None:
                raise ValueError("the model does not tell its queries as projected")
            q, scale = inputs.raw_queries().reshape(q.shape), q.shape[-1] ** -0.5
        if (
            inputs.causal
        ):  # queries that do not see a slot add nothing to it, so that they cannot be summed first
            scores = self._scores(self._select_queries(q, queries), scale, self._tokens(q, queries))
            return scores.masked_fill_(scores == -torch.inf, 0).sum(2).flatten(0, 1)
        summed = self._select_queries(q, queries).sum(2, keepdim=True)
        return self._scores(summed, scale).flatten(0, 2)

    def keys(self, *, rotated: bool = True) -> Tensor:
        """[rows, segment.length, D]: the current segment's keys, or what they were before the rotation."""
        keys, rotation = self._narrow(self._seen.k.flatten(0, 1)), self._seen.rotation
        if rotated or rotation is None:
            return keys
        return unrotate(keys, rotation[self.segment.start : self.segment.end])

    def values(self) -> Tensor:
        """[rows, segment.length, D]: the current segment's values."""
        return self._narrow(self._seen.v.flatten(0, 1))

    def read_back(self, keys: Tensor, values: Tensor, segment: Segment, bits: int) -> tuple[Tensor, Tensor]:
        """[rows, segment.length, D] each: keys and values of a segment as they would be read out of codebooks."""
        seen = self._seen
        if not seen.books and bits < 16:
            raise ValueError("there are no codebooks: derive the observer from `ReadsCodebooks`")
        books = {name: book[self.layer] for name, book in (seen.books or {}).items()}
        rotation = None if seen.rotation is None else seen.rotation[segment.start : segment.end]
        read = read_back(keys[None], values[None], bits, segment.index, books, rotation)
        return read[0].flatten(0, 1), read[1].flatten(0, 1)

    def cached_keys(self, *, rotated: bool = True) -> Tensor:
        """[rows, slots, D]: keys of all slots, cached and current; zeros where a row has no such slot."""
        keys = self._narrow(self._join(self._seen.store.keys, self._seen.k))
        rotation = None if rotated else self.rotation(self.position.clamp(min=0))
        return keys if rotation is None else unrotate(keys, rotation)

    def cached_values(self) -> Tensor:
        """[rows, slots, D]: values of all slots, as `cached_keys` has their keys."""
        return self._narrow(self._join(self._seen.store.values, self._seen.v))

    def value_norms(self) -> Tensor:
        """float32 [rows, slots]: norm of each slot's value; 0 where a row has no such slot."""
        return torch.linalg.vector_norm(self.cached_values(), dim=-1, dtype=torch.float32)

    def output_projection(self) -> Tensor | None:
        """[heads, query heads per KV head, width, D]: what maps each query head's output to the residual stream."""
        project, fold = self._seen.projection, self._seen.q.shape[2] // self.segment.length
        weight = None if project is None else project(self.layer)
        return None if weight is None else weight.unflatten(1, (self.heads, fold, -1)).movedim(0, 2)

    def bias(self) -> Tensor:
        """float32 [rows, slots]: what is added to all scores of each slot, in nats."""
        if not self._seen.biased:
            raise ValueError("slots have no bias: let `biased` return True")
        return read_bias(self._join(self._seen.store.keys, self._seen.k))

    def replace(self, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Store the slots that are kept with other contents."""
        if (bias is not None) != self._seen.biased:
            raise ValueError("a bias goes with `biased`: give one if it is True, and none if it is False")
        self.replaced = (keys, values) if bias is None else (attach_bias(keys, bias), widen(values))

    def lse(self, queries: Tensor, kept: Tensor | None = None) -> Tensor:
        """float32 [rows, query heads per KV head, queries]: log-sum-exp of the scores of a few queries.

        Args:
            queries: int64 [n].
            kept: bool [rows, slots], the slots that stay, with the contents that replace theirs; None for all as they
                were.
        """
        scores = self.scores(queries)
        if kept is None:
            return scores.logsumexp(-1)
        unseen = scores == -torch.inf
        if self.replaced is not None:
            q = self._select_queries(self._seen.q, queries).flatten(0, 1).float() * self._seen.scale
            scores = (q @ self.replaced[0].float().mT).unflatten(1, (-1, len(queries)))
        return scores.masked_fill(unseen | ~kept[:, None, None], -torch.inf).logsumexp(-1)

    def previous_keys(self) -> Tensor:
        """[rows, tokens, D]: those of the segment before."""
        before = self._seen.store.before
        if before is None:
            raise ValueError(
                "no earlier keys: derive the method from `ComparesKeys`, and do not call this at the first segment"
            )
        return self._narrow(before.flatten(0, 1))

    def _narrow(self, x: Tensor) -> Tensor:
        return narrow(x) if self._seen.biased else x

    def _join(self, storage: Tensor, current: Tensor) -> Tensor:
        """Return all slots, cached and current, as they are stored: [rows, slots, D], zeros where a row has none."""
        layout = self._seen.store.layout
        past = pad_rows(storage, layout).to(current.dtype)
        if self._in_front is not None:
            current = current * (self.position[:, -self.segment.length :] >= 0)[..., None]
        current = fold_rows(current, *past.shape[:2])
        return torch.cat((past * (layout.positions >= 0)[..., None], current), 2).flatten(0, 1)

    @property
    def _seen(self) -> LayerInputs:
        if self._given is None:
            raise ValueError("a static method cannot look at data: set `static = False`")
        return self._given

    def _select_queries(self, q: Tensor, chosen: Tensor | None) -> Tensor:
        """Select query tokens from `q`.

        Args:
            q: [batch, rows, queries, ...]; the query heads of one KV head lie behind each other along `queries`.
            chosen: int64 token numbers within the current segment; None returns `q` unchanged.
        """
        if chosen is None:
            return q
        tokens = self.segment.length
        folds = torch.arange(q.shape[2] // tokens, device=q.device)[:, None] * tokens
        return q.index_select(2, (folds + chosen.to(q.device, non_blocking=True)).flatten())

    def _tokens(self, q: Tensor, chosen: Tensor | None) -> Tensor | None:
        """Return the token number int32 of every chosen query in a causal segment, None where all keys are seen."""
        if not self._seen.causal:
            return None
        every = torch.arange(self.segment.length, dtype=torch.int32) if chosen is None else chosen.int()
        return every.to(q.device, non_blocking=True).repeat(q.shape[2] // self.segment.length)

    @property
    def _in_front(self) -> Tensor | None:
        """int64 [rows]: tokens of the current segment that do not exist; None behind the prompt and without padding."""
        return None if self.segment.index else self.padding

    def _scores(self, q: Tensor, scale: float, tokens: Tensor | None = None) -> Tensor:
        store = self._seen.store
        scores = attention_scores(q, self._seen.k, store.past, scale, tokens=tokens)
        if self._in_front is not None and tokens is not None:
            exists = (self.position >= 0)[:, None] & (tokens >= self._in_front[:, None])[..., None]
            scores.masked_fill_(~exists, -torch.inf)
        return scores

    def _mass(self, queries: Tensor | None = None, power: int = 1) -> Tensor:
        _, q, k, _, store, scale, _, lse, *_ = self._seen
        if self._in_front is not None:
            return self._mass_behind(self._in_front, queries, power)
        return attention_mass(
            self._select_queries(q, queries),
            k,
            store.past,
            scale,
            power=power,
            lse=None if lse is None else self._select_queries(lse, queries),
            tokens=self._tokens(q, queries),
        )

    def _mass_behind(self, padding: Tensor, queries: Tensor | None, power: int) -> Tensor:
        """Return the mass in padded prompts: a mean over the queries that exist, 0 where none of them does."""
        q, tokens = self._select_queries(self._seen.q, queries), self._tokens(self._seen.q, queries)
        assert tokens is not None  # prompts are causal
        asks = tokens >= padding[:, None]
        weights = self._scores(q, self._seen.scale, tokens).softmax(-1).masked_fill(~asks[..., None], 0)
        return weights.pow(power).sum(2) / asks.sum(1, keepdim=True).clamp(min=1)
