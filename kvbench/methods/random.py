"""Tokens kept at random: what a method has to beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import draw_uniform
from kvbench.methods.shared.view import View


@dataclass
class Random(Scored):
    """Keep the sinks and, of all other tokens so far, a random choice, an even share of B in every head.

    Every token draws a number when it is cached and the highest stay, so that what is kept is at any time a uniform
    choice among all tokens seen. Heads and layers draw for themselves; a prompt's branches keep the same tokens.

    Attributes:
        seed: of the numbers, which depend on it, the prompt, the layer and the segment alone.
    """

    seed: int = 0

    accumulates: ClassVar[bool] = True

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse scores that are asked for less often, as there are none, and what `Scored` refuses."""
        super().check(spec, budget)
        if self.refresh != 1:
            raise ValueError(
                f"method.refresh={self.refresh}: every segment draws its numbers; set method.refresh=1"
            )

    def observe(self, view: View) -> None:
        """Draw for the segment's tokens."""
        first, known = self.spec.first_head, dict.fromkeys(view.prompts)
        shape = (first + view.heads, view.segment.length)
        drawn = {
            prompt: draw_uniform(f"{self.seed}:{prompt}:{view.layer}:{view.segment.index}", shape)[first:]
            for prompt in known
        }
        rows = torch.cat([drawn[prompt] for prompt in view.prompts])
        view.state[:, -view.segment.length :] = rows.to(view.state.device, non_blocking=True)

    def score(self, view: View) -> Tensor:
        """Return what each token drew, float32 [rows, slots]."""
        return view.state
