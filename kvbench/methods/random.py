"""Tokens kept at random: what a method has to beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.files import hash_content
from kvbench.methods.capabilities import Stateful
from kvbench.methods.scored import Scored
from kvbench.methods.view import View


@dataclass
class Random(Stateful, Scored):
    """Keep the sinks and, of all other tokens so far, a random choice, an even share of B in every head.

    Every token draws a number when it is cached and the highest stay, so that what is kept is at any time a uniform
    choice among all tokens seen. Heads and layers draw for themselves; a prompt's branches keep the same tokens.

    Attributes:
        seed: of the numbers, which depend on it, the prompt, the layer and the segment alone.
    """

    seed: int = 0

    def keep(self, view: View) -> Tensor | None:
        """Draw for the segment's tokens, then keep the highest."""
        first, known = self.spec.first_head, dict.fromkeys(view.prompts)
        shape = (first + view.heads, view.segment.length)
        drawn = {
            prompt: self._draw(prompt, view.layer, view.segment.index, shape)[first:] for prompt in known
        }
        rows = torch.cat([drawn[prompt] for prompt in view.prompts])
        view.state[:, -view.segment.length :] = rows.to(view.state.device, non_blocking=True)
        return super().keep(view)

    def score(self, view: View) -> Tensor:
        """Return what each token drew, float32 [rows, slots]."""
        return view.state

    def _draw(self, prompt: int, layer: int, segment: int, shape: tuple[int, int]) -> Tensor:
        seed = int(hash_content(f"{self.seed}:{prompt}:{layer}:{segment}")[:16], 16) >> 1
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed))
