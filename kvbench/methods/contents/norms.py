"""Knorm and CUR: scores by the norms of keys and values."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.draws import DRAWN_ON_HOST, draw_normal
from kvbench.methods.shared.grouped import sum_runs
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.newest import fit_newest
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_leading
from kvbench.methods.shared.view import View

Kind = Literal["kv_product", "kv_avg", "key", "value"]


@dataclass
class KeyNorm(Scored):
    """Keep the tokens whose keys have the smallest norm, an even share of B in every head (arXiv:2406.11430).

    If a model normalises its keys, all norms are equal and the earliest tokens are kept.
    """

    recordable: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """Return the negative norm of each key, float32 [rows, slots]."""
        return -torch.linalg.vector_norm(view.cached_keys(), dim=-1, dtype=torch.float32)


@dataclass
class CUR(Scored):
    """Keep the tokens of largest key and value norms among their neighbours (CurDKV, arXiv:2509.15038; kvpress).

    Squared norms approximate the leverage scores of the matrices of keys and values.

    Differs from the program in: eviction happens once per segment, and neighbours are cached tokens.

    With `project`, keys and values are projected by a Gaussian matrix first, the same for both and for all heads of a
    layer and prompt. With `local=false` and the newest 64 tokens kept, these are the CUR variants that VaSE
    (arXiv:2606.03928) compares with: CUR Fixed, and with `redraw` CUR Resample.

    Attributes:
        kind: product or mean of both squared norms, or the norm of the key or the value alone.
        local: divide each norm by its sum over a block of neighbours.
        block: neighbours of a block.
        project: channels of the projection; None for none.
        redraw: draw the projection anew at every segment; otherwise once for a prompt.
        window: newest tokens that are kept, at most half of the capacity without sinks.
        seed: seed of the projection.
    """

    kind: Kind = "kv_product"
    local: bool = True
    block: int = 16
    project: int | None = None
    redraw: bool = False
    window: int = 0
    seed: int = 0

    recordable: ClassVar[bool] = True
    limits = set_limits(
        block=Limit(1), project=Limit(1, wants="must be at least 1, or null for none"), window=Limit(0)
    )

    @property
    def graph_obstacle(self) -> str | None:
        """The random projections differ between prompts; a recording would repeat the first."""
        return super().graph_obstacle if self.project is None else DRAWN_ON_HOST

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings of a missing projection, and what `Scored` refuses."""
        super().check(spec, budget)
        for name, value in (("redraw", self.redraw), ("seed", self.seed)):
            if value and self.project is None:
                raise ValueError(
                    f"method.{name}={value}: nothing is drawn without a projection; set method.project=20 or leave "
                    f"method.{name} out"
                )

    def score(self, view: View) -> Tensor:
        """Return squared norms, infinity for the first and newest tokens: float32 [rows, slots]."""
        block = self.block if self.local else 0
        keys, values = view.cached_keys(), view.cached_values()
        if self.project is not None:
            projection = self._draw_projection(view, self.project)
            keys, values = keys.float() @ projection, values.float() @ projection
        norms = weigh_norms(keys, values, view.position >= 0, self.kind, block)
        stays = find_leading(view, self.leading)
        if self.window:
            stays = stays | (view.position >= view.segment.end - fit_newest(self, view, self.window))
        return norms.masked_fill(stays, torch.inf)

    def _draw_projection(self, view: View, channels: int) -> Tensor:
        """Draw the Gaussian projection of each prompt, float32 [rows, D, channels]."""
        segment = f":{view.segment.index}" if self.redraw else ""
        shape = (self.spec.head_dim, channels)
        drawn = {
            prompt: draw_normal(f"{self.seed}:{prompt}:{view.layer}{segment}", shape)
            for prompt in dict.fromkeys(view.prompts)
        }
        rows = torch.stack([drawn[prompt] for prompt in view.prompts]).repeat_interleave(view.heads, 0)
        return rows.to(view.position.device, non_blocking=True) / channels**0.5


def weigh_norms(keys: Tensor, values: Tensor, exists: Tensor, kind: Kind, block: int) -> Tensor:
    """Return combined squared norms of keys and values, float32 [rows, slots], with sum 1 in each row (`CUR.kind`).

    Keys and values [rows, slots, D] are zeros in missing slots (`exists`, bool [rows, slots], is False). Norms are
    normalised over `block` neighbours, 0 for none.
    """
    key, value = (x.float().square().sum(-1) for x in (keys, values))
    if block:
        ids = (exists.cumsum(1) - 1).clamp(min=0) // block
        key, value = (x / sum_runs(x, ids).clamp(min=1e-30).float() for x in (key, value))
    norms = {"kv_product": key * value, "kv_avg": (key + value) / 2, "key": key, "value": value}[kind]
    return norms / norms.sum(1, keepdim=True).clamp(min=1e-30)
