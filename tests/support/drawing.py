"""What tests of next-token models share: no noise, notes of what a model said, closeness."""

import pytest
import torch
from torch import Tensor

from kvbench.models.parts.decoder import Decoder


def close(found: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def halves_as_pairs(x: Tensor) -> Tensor:
    """Channels of heads in the order of this project: every score is the same."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class Silence:
    """No noise: the likeliest token is drawn, the first of equals."""

    def __init__(self, prompts: int = 1) -> None:
        self._prompts = prompts

    def draw(self, count: int) -> Tensor:
        return torch.ones(self._prompts, count)


class Recorded:
    """A language model whose logits and hidden states are noted."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[Tensor] = []
        self.hidden: list[Tensor] = []
        inner = model.logits

        def logits(x: Tensor) -> Tensor:
            self.hidden.append(model.norm(x))
            self.logits.append(inner(x))
            return self.logits[-1]

        monkeypatch.setattr(model, "logits", logits)
