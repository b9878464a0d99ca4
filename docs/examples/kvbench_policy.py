"""KV-cache policies of kvbench in other programs. Copy this file; it needs torch and safetensors alone.

A policy (`python run.py task=export export.policy=FILE method=...`) says for every layer, KV head and token position
after which segment the token leaves the cache. Segments are scales, or a prompt and the chunks that follow it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F


class Policy:
    """A policy file; raises ValueError if it is another file or of another version.

    Attributes:
        metadata: of the file (docs/deploy.md lists its fields).
        layers: self-attention layers.
        heads: KV heads of a layer.
        ends: position after the last token of each segment.
        dropped_after: int32 [layers, heads, positions + 1], index of the segment after which a token leaves; the last
            column stands for the tokens of the last segment, which stay.
    """

    def __init__(self, path: str | Path) -> None:
        with safe_open(path, framework="pt") as file:
            self.metadata = json.loads((file.metadata() or {}).get("kvbench", "{}"))
            if (self.metadata.get("format"), self.metadata.get("version")) != ("kvbench.policy", 1):
                raise ValueError(f"{path}: no policy of kvbench, version 1")
            table = file.get_tensor("dropped_after")
        self.layers, self.heads, _ = table.shape
        lengths = [height * width for height, width in self.metadata["segments"]]
        self.ends: list[int] = torch.tensor(lengths).cumsum(0).tolist()
        self.dropped_after = F.pad(table, (0, 1), value=len(lengths))

    def keep(
        self, layer: int, segment: int, keys: Tensor, values: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a layer keeps after a segment of what it has cached; heads that keep less are padded at the end.

        Args:
            layer: index of the layer.
            segment: index of the segment; tokens of later ones stay.
            keys: [sequences, heads, slots, D].
            values: shaped like keys.
            positions: int64 [heads, slots], token position of every slot; -1 where a slot is padding.

        Returns:
            Keys and values [sequences, heads, kept, D], and positions int64 [heads, kept].
        """
        self.dropped_after = self.dropped_after.to(positions.device)
        column = positions.clamp(0, self.dropped_after.shape[2] - 1)
        stays = (self.dropped_after[layer].gather(1, column) > segment) & (positions >= 0)
        slots = (~stays).byte().argsort(dim=1, stable=True)[:, : int(stays.sum(1).max())]
        positions = positions.gather(1, slots).masked_fill(~stays.gather(1, slots), -1)
        index = slots[None, :, :, None].expand(len(keys), -1, -1, keys.shape[3])
        return keys.gather(2, index), values.gather(2, index), positions


class LayerCache:
    """Keys and values of one layer during one generation.

    Attributes:
        keys: [sequences, heads, slots, D], what the next tokens attend to; None before the first.
        values: shaped like keys.
        positions: int64 [heads, slots], token position of every slot; -1 where a slot is padding.
        seen: position of the next token; it starts above 0 where a prompt is shorter than the policy's first segment.
    """

    def __init__(self, policy: Policy, layer: int, first: int = 0) -> None:
        self.policy, self.layer, self.seen = policy, layer, first
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.positions = torch.empty(policy.heads, 0, dtype=torch.int64)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append tokens, [sequences, heads, tokens, D], and drop what leaves if they complete a segment.

        Returns:
            What the tokens attend to, themselves included: keys, values and positions, as the attributes have them.
        """
        start, self.seen = self.seen, self.seen + keys.shape[2]
        if self.seen > self.policy.ends[-1]:
            raise ValueError(f"token {self.seen} came; the policy is for {self.policy.ends[-1]}")
        new = torch.arange(start, self.seen, device=keys.device).expand(len(self.positions), -1)
        positions = torch.cat((self.positions.to(keys.device), new), 1)
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.keys, self.values, self.positions = keys, values, positions
        completed = [k for k, end in enumerate(self.policy.ends[:-1]) if start < end <= self.seen]
        if completed:
            kept = self.policy.keep(self.layer, completed[-1], keys, values, positions)
            self.keys, self.values, self.positions = kept
        return keys, values, positions


def select_mask(mask: Tensor, positions: Tensor) -> Tensor:
    """Turn a mask over positions, bool [sequences, 1, queries, positions], into one over slots, with heads."""
    column = positions.clamp(min=0)[None, :, None].expand(len(mask), -1, mask.shape[2], -1)
    return mask.expand(-1, len(positions), -1, -1).gather(3, column) & (positions >= 0)[None, :, None]


def open_transformers_cache(policy: Policy, prompt_tokens: int) -> Any:
    """Return a cache of transformers (5.0 or later), `past_key_values`, for unpadded prompts of so many tokens.

    Raises:
        ValueError: the prompt is longer than the policy's, or heads keep different numbers of tokens.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    first, table = policy.ends[0] - prompt_tokens, policy.dropped_after
    if first < 0:
        raise ValueError(f"prompt of {prompt_tokens} tokens: the policy is for {policy.ends[0]} at most")
    counts = [(table[:, :, first:end] > k).sum(2) for k, end in enumerate(policy.ends[:-1])]
    if any((count != count[0, 0]).any() for count in counts):
        raise ValueError("heads keep different numbers of tokens, and transformers has one mask for all")

    class PolicyLayer(LayerCache, DynamicLayer):
        is_croppable, is_initialized = False, True

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Any:
            return super().update(keys, values)[:2]

        def get_seq_length(self) -> int:  # rotary positions count the tokens seen
            return self.seen - first

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # masks count those held
            held = self.positions.shape[1]
            return held + query_length, self.seen - first - held

        def reset(self) -> None:
            LayerCache.__init__(self, policy, self.layer, first)

    return Cache(layers=[PolicyLayer(policy, layer, first) for layer in range(policy.layers)])
