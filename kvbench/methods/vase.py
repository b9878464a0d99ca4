"""VaSE: eviction at random by attention, with the largest values exempt."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.draws import DRAWN_ON_HOST, draw_by_row
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.newest import NewestKept
from kvbench.methods.shared.select import (
    average_attention,
    check_window,
    choose_best,
    find_leading,
    find_sinks,
    find_valid_queries,
    smooth,
)
from kvbench.methods.shared.view import View

Magnitude = Literal["range", "variance", "norm"]
LARGE = Limit(0, 0.99, "must lie in 0..0.99, because the window and drawn tokens need the rest")


@dataclass
class VaSE(NewestKept):
    """Keep the newest tokens, tokens of large values, and tokens sampled in proportion to attention (arXiv:2606.03928).

    A value is large if its range, the maximum less the minimum over channels, is among the `large` C highest of a head
    of capacity C. The other slots get the attention of the window's queries, with a softmax over the slots outside the
    window, pooled over neighbours. They are sampled without replacement with probabilities proportional to it, anew at
    every eviction. Slots without attention come last, the oldest first. The first tokens (`leading`, 4 in the program)
    count as large. With a protected prompt (`sinks=1` in texts) the rule holds for the rest of the capacity.

    Differs from the program in: kept tokens stay in the order of positions, where the program stores them in the order
    of selection, so that its pooling mixes tokens that are not neighbours. Attention is float32. In images the first
    tokens are protected as under every other method. The window's queries are of the newest segment, which is the whole
    window in texts if a chunk has 64 tokens. The program's budget is B per head, window included, as here.

    Attributes:
        window: newest tokens that are kept and whose queries decide; None for 64 in texts, a row in images, but at most
            half of the capacity without sinks.
        large: share of a head's capacity for large values; 0 for none.
        magnitude: magnitude of a value: `range`, `variance` over its channels (divisor D - 1), or Euclidean `norm`.
        draw: sample the other slots; otherwise keep the slots of most attention.
        kernel: neighbours of the mean that smooths attention, odd; 1 for none.
        seed: seed of the draws, which also depend on the prompt, the layer and the segment.
    """

    large: float = 0.25
    magnitude: Magnitude = "range"
    draw: bool = True
    kernel: int = 5
    seed: int = 0

    recordable: ClassVar[bool] = True
    limits = set_limits(
        window=Limit(1, wants="must be at least 1, or null for the family's default"), large=LARGE
    )

    @property
    def graph_obstacle(self) -> str | None:
        """Random draws differ between prompts; a recording would repeat the first."""
        return DRAWN_ON_HOST if self.draw else super().graph_obstacle

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse an even smoothing kernel, and what `NewestKept` refuses."""
        check_window(self.window or 1, self.kernel, "last")
        super().check(spec, budget)

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the minimum capacity in which large values leave room for the window and a drawn token."""
        return int((self.window or 0) / (1 - self.large)) + 1

    def default_window(self, view: View) -> int:
        """Return the tokens of the default window: 64 in texts, a row in images."""
        return super().default_window(view) or view.segment.width

    def count_window(self, view: View) -> Tensor:
        """Return the tokens of the window, which are of the newest segment: int64 [rows, 1], or [1, 1] for all rows."""
        window = super().count_window(view)
        if isinstance(window, int):
            window = view.position.new_full((1, 1), window)
        return window.clamp(1, view.segment.length)

    def score(self, view: View) -> Tensor:
        """Return infinity for the window and large values, random scores elsewhere: float32 [rows, slots]."""
        window = self.count_window(view)
        newest = view.position >= view.segment.end - window
        large = self.find_large(view, newest)
        weights = self._attend(view, newest, window).masked_fill(large, 0)
        scores = weights / self._draw_exponential(view) if self.draw else weights
        return scores.masked_fill(large | newest, torch.inf)

    def find_large(self, view: View, newest: Tensor) -> Tensor:
        """Return the slots of large values between protected segments and window, bool [rows, slots]."""
        prompt = find_sinks(view, self.sinks)
        between = (view.position >= 0) & ~prompt & ~newest
        if not self.large:
            return torch.zeros_like(between)
        free = self.row_capacities(view) - prompt.sum(1)
        count = torch.minimum((self.large * free.double()).long(), free - newest.sum(1))
        first = find_leading(view, self.leading)
        magnitudes = self._measure(view).masked_fill(first, torch.inf).masked_fill(~between, -torch.inf)
        return choose_best(magnitudes, count) & between

    def _measure(self, view: View) -> Tensor:
        """Return the magnitude of each slot's value, float32 [rows, slots]."""
        if self.magnitude == "range":
            return view.value_ranges()
        return view.value_norms() if self.magnitude == "norm" else view.cached_values().float().var(-1)

    def _attend(self, view: View, newest: Tensor, window: Tensor) -> Tensor:
        """Return the pooled attention of the window's queries, 0 in the window, float32 [rows, slots]."""
        length = view.segment.length
        count = min(self.window or self.default_window(view), length)
        chosen = torch.arange(length - count, length)
        asking = chosen.to(window.device, non_blocking=True) >= length - window
        exist = find_valid_queries(view, chosen)
        asking = asking if exist is None else asking & exist
        scores = view.scores(chosen)
        attention = average_attention(scores, newest, softmax="prefix", group="mean", asking=asking)
        return smooth(attention, "avg", self.kernel, view.exists)

    def _draw_exponential(self, view: View) -> Tensor:
        """Return an Exp(1) variate per slot, by its rank among the row's slots: float32 [rows, slots]."""
        uniform = draw_by_row(self.seed, view, self.spec, view.segment.end)
        rank = (view.position >= 0).cumsum(1) - 1
        return -uniform.gather(1, rank.clamp(min=0)).clamp(min=1e-30).log()
