"""Data-free baseline that keeps random tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.draws import DRAWN_ON_HOST, draw_by_row
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_begin
from kvbench.methods.shared.view import View


@dataclass
class Random(Scored):
    """Keep the sinks and a random choice of all other tokens so far, an even share of B in every head.

    Each token gets a random score when it is cached, and the highest scores are kept. The choice is therefore uniform
    among all tokens so far. Each head and layer draws its own scores; the branches of a prompt keep the same tokens.

    Attributes:
        seed: seed of the scores, which also depend on the prompt, the layer and the segment.
    """

    seed: int = 0

    own_state: ClassVar[int] = 1
    revision: ClassVar[int] = 2  # before, draws depended on the padding in front of a prompt
    graph_obstacle = DRAWN_ON_HOST  # draws differ between prompts

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse `refresh`, because each segment draws its scores, and what `Scored` refuses."""
        super().check(spec, budget)
        if self.refresh != 1:
            raise ValueError(
                f"method.refresh={self.refresh}: every segment draws its scores; set method.refresh=1"
            )

    def observe(self, view: View) -> None:
        """Draw random scores for the segment's tokens."""
        length = view.segment.length
        draws = draw_by_row(self.seed, view, self.spec, length)
        if view.segment.index == 0 and view.padding is not None:
            token = torch.arange(length, device=draws.device) - find_begin(view)
            draws = draws.gather(1, token.clamp(min=0).expand_as(draws))
        view.state[:, -length:] = draws

    def score(self, view: View) -> Tensor:
        """Return each slot's random score, float32 [rows, slots]."""
        return view.state
