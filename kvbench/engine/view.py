"""View that a method gets of one layer right after a segment ran.

`View` documents each method; `engine/layer.py` has the legend of shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.engine.bias import attach_bias, narrow, read_bias, widen
from kvbench.engine.coding.read_back import read_back
from kvbench.engine.layer import LayerInputs
from kvbench.kernels.attention_mass import attention_mass, attention_scores
from kvbench.kernels.layout import pad_rows
from kvbench.kernels.planes import unrotate
from kvbench.methods.shared.view import View

find_norms = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)


@dataclass
class CacheView(View):
    """One layer of a cache right after a segment.

    Attributes:
        segments: all segments of a generation.
        replaced: keys and values [rows, slots, D] given to `replace`, in stored form; None before the call.
        unprotected: int64 [rows], number of slots given to `count_unprotected`; None before the call.

    Raises:
        ValueError: a static method reads anything but positions.
    """

    layer: int
    segment: Segment
    sequences: int
    heads: int
    position: Tensor
    segments: Sequence[Segment]
    state: Tensor
    _given: LayerInputs | None = field(default=None, repr=False)
    prompts: Sequence[int] = ()
    padding: Tensor | None = None
    padding_charge: Tensor | None = None
    prompt_lengths: Sequence[int] = ()
    _segment_ids: Tensor | None = field(default=None, repr=False)
    replaced: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)
    unprotected: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def segment_ids(self) -> Tensor:
        if self._segment_ids is None:
            starts = torch.tensor([each.start for each in self.segments]).to(
                self.position.device, non_blocking=True
            )
            self._segment_ids = torch.bucketize(self.position, starts, right=True) - 1
        return self._segment_ids

    @cached_property
    def exists(self) -> Tensor | None:
        given = self._given
        whole = given is not None and given.store.layout.uniform and self._current_padding is None
        return None if whole else self.position >= 0

    def mass(self, queries: Tensor | None = None, *, power: int = 1) -> Tensor:
        q, tokens = self._select_queries(self._inputs.q, queries), self._list_tokens(queries)
        if self._current_padding is not None:
            assert tokens is not None  # padded prompts are causal
            exists = tokens >= self._current_padding[:, None]
            scores = self._score(q, self._inputs.scale, tokens)
            weights = scores.softmax(-1).masked_fill(~exists[..., None], 0)
            mass = weights.pow(power).sum(2) / exists.sum(1, keepdim=True).clamp(min=1)
            return mass.flatten(0, 1)
        _, _, k, _, store, scale, _, lse, *_ = self._inputs
        lse = None if lse is None else self._select_queries(lse, queries)
        return attention_mass(q, k, store.past, scale, power=power, lse=lse, tokens=tokens).flatten(0, 1)

    def scores(self, queries: Tensor) -> Tensor:
        q = self._select_queries(self._inputs.q, queries)
        scores = self._score(q, self._inputs.scale, self._list_tokens(queries))
        return scores.flatten(0, 1).unflatten(1, (-1, len(queries)))

    def queries(self, chosen: Tensor, *, rotated: bool = True) -> Tensor:
        q = self._select_queries(self._narrow(self._inputs.q), chosen).flatten(0, 1).float()
        q = (q * self._inputs.scale).unflatten(1, (-1, len(chosen)))
        rotation = None if rotated else self.rotation(self.segment.start + chosen)
        return q if rotation is None else unrotate(q, rotation)

    def rotation(self, positions: Tensor) -> Tensor | None:
        rotation = self._inputs.rotation
        return None if rotation is None else rotation[positions.to(rotation.device, non_blocking=True)]

    def logits(self, queries: Tensor, *, raw_queries: bool = False) -> Tensor:
        inputs = self._inputs
        q, scale = inputs.q, inputs.scale
        if raw_queries:
            if inputs.raw_queries is None:
                raise ValueError("the model does not expose its queries as projected")
            q, scale = inputs.raw_queries().reshape(q.shape), q.shape[-1] ** -0.5
        q = self._select_queries(q, queries)
        # A query adds nothing to keys that it does not see, so queries cannot be summed first.
        if inputs.causal:
            scores = self._score(q, scale, self._list_tokens(queries))
            return scores.masked_fill_(scores == -torch.inf, 0).sum(2).flatten(0, 1)
        return self._score(q.sum(2, keepdim=True), scale).flatten(0, 2)

    def keys(self, *, rotated: bool = True) -> Tensor:
        keys, rotation = self._narrow(self._inputs.k.flatten(0, 1)), self._inputs.rotation
        if rotated or rotation is None:
            return keys
        return unrotate(keys, rotation[self.segment.start : self.segment.end])

    def values(self) -> Tensor:
        return self._narrow(self._inputs.v.flatten(0, 1))

    def read_back(self, keys: Tensor, values: Tensor, segment: Segment, bits: int) -> tuple[Tensor, Tensor]:
        inputs = self._inputs
        if not inputs.codebooks and bits < 16:
            raise ValueError("no codebooks: set `codebooks` in `uses`")
        codebooks = {name: codebook[self.layer] for name, codebook in (inputs.codebooks or {}).items()}
        rotation = None if inputs.rotation is None else inputs.rotation[segment.start : segment.end]
        return read_back(keys, values, bits, segment.index, codebooks, rotation)

    def cached_keys(self, *, rotated: bool = True) -> Tensor:
        keys = self._narrow(self._join(self._inputs.store.keys, self._inputs.k))
        rotation = None if rotated else self.rotation(self.position.clamp(min=0))
        return keys if rotation is None else unrotate(keys, rotation)

    def cached_values(self) -> Tensor:
        return self._narrow(self._join(self._inputs.store.values, self._inputs.v))

    def value_norms(self) -> Tensor:
        past, current = self._inputs.store.past, self._narrow(self._inputs.v)
        if past.joined is not None:
            joined = find_norms(self._narrow(past.joined.read_slots(1))).flatten(0, 1)
        else:  # norms take less memory than joined values
            old = find_norms(self._narrow(pad_rows(past.values, past.layout).to(current.dtype)))
            joined = torch.cat((old.view(*current.shape[:2], -1), find_norms(current)), 2).flatten(0, 1)
        return joined if self.exists is None else joined * self.exists

    def value_ranges(self) -> Tensor:
        low, high = self.cached_values().float().aminmax(dim=-1)
        return high - low

    def output_projection(self) -> Tensor | None:
        project, group = self._inputs.projection, self._inputs.q.shape[2] // self.segment.length
        weight = None if project is None else project(self.layer)
        return None if weight is None else weight.unflatten(1, (self.heads, group, -1)).movedim(0, 2)

    def bias(self) -> Tensor:
        if not self._inputs.biased:
            raise ValueError("slots have no bias: set `bias` in `uses`")
        return read_bias(self._join(self._inputs.store.keys, self._inputs.k))

    def replace(self, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        if (bias is not None) != self._inputs.biased:
            raise ValueError("View.replace: `bias` must be given exactly if `uses` has `bias`")
        self.replaced = (keys, values) if bias is None else (attach_bias(keys, bias), widen(values))

    def count_unprotected(self, slots: Tensor) -> None:
        self.unprotected = slots.sum(1)

    def lse(self, queries: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the log-sum-exp of the scores of some queries, float32 [rows, query heads per KV head, queries].

        Args:
            queries: int64 [n].
            kept: bool [rows, slots], the kept slots, with replaced contents; None for all slots before replacement.
        """
        scores = self.scores(queries)
        if kept is None:
            return scores.logsumexp(-1)
        unseen = scores == -torch.inf
        if self.replaced is not None:
            q = self._select_queries(self._inputs.q, queries).flatten(0, 1).float() * self._inputs.scale
            scores = (q @ self.replaced[0].float().mT).unflatten(1, (-1, len(queries)))
        return scores.masked_fill(unseen | ~kept[:, None, None], -torch.inf).logsumexp(-1)

    def previous_keys(self) -> Tensor:
        keys = self._inputs.store.previous_keys
        if keys is None:
            raise ValueError(
                "no keys of an earlier segment: set `previous_keys` in `uses`, and do not call this at segment 0"
            )
        return self._narrow(keys.flatten(0, 1))

    @property
    def _inputs(self) -> LayerInputs:
        if self._given is None:
            raise ValueError("a static method cannot look at data: set `static = False`")
        return self._given

    @property
    def _current_padding(self) -> Tensor | None:
        """Padding tokens of the current segment, int64 [rows]; None after the prompt and without padding."""
        return None if self.segment.index else self.padding

    def _narrow(self, x: Tensor) -> Tensor:
        return narrow(x) if self._inputs.biased else x

    def _join(self, storage: Tensor, current: Tensor) -> Tensor:
        """Return all slots, cached and current, [rows, slots, D], as stored; zeros where a row lacks the slot."""
        layout = self._inputs.store.layout
        past = pad_rows(storage, layout).to(current.dtype)
        if not layout.uniform:
            past = past * (layout.positions >= 0)[..., None]
        if self._current_padding is not None:
            exists = self.position[:, -self.segment.length :] >= 0
            current = current * exists.view(*current.shape[:3], 1)
        return torch.cat((past.reshape(*current.shape[:2], *past.shape[2:]), current), 2).flatten(0, 1)

    def _select_queries(self, q: Tensor, chosen: Tensor | None) -> Tensor:
        """Select tokens int64 [n] of the current segment from q [S, H, Q, ...]; None selects all."""
        if chosen is None:
            return q
        length = self.segment.length
        if q.shape[2] == length:
            return q.index_select(2, chosen.to(q.device, non_blocking=True))
        firsts = torch.arange(q.shape[2] // length, device=q.device)[:, None] * length
        return q.index_select(2, (firsts + chosen.to(q.device, non_blocking=True)).flatten())

    def _list_tokens(self, chosen: Tensor | None) -> Tensor | None:
        """Return the token of each chosen query in a causal segment, int32 [Q]; None if queries see all keys."""
        inputs, length = self._inputs, self.segment.length
        if not inputs.causal:
            return None
        tokens = torch.arange(length, dtype=torch.int32) if chosen is None else chosen.int()
        return tokens.to(inputs.q.device, non_blocking=True).repeat(inputs.q.shape[2] // length)

    def _score(self, q: Tensor, scale: float, tokens: Tensor | None = None) -> Tensor:
        """Return scores of q [S, H, Q, D], float32 [B, R, Q, slots]; `tokens` as from `_list_tokens`."""
        scores = attention_scores(q, self._inputs.k, self._inputs.store.past, scale, tokens=tokens)
        if self._current_padding is not None and tokens is not None:
            exists = (self.position >= 0)[:, None] & (tokens >= self._current_padding[:, None])[..., None]
            scores.masked_fill_(~exists, -torch.inf)
        return scores
