"""What every training is asked: where it resumes, that everything trains, and that its network can be compiled."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.extras.training.autoencoder import AutoencoderRecipe
from kvbench.extras.training.loop import fit
from kvbench.extras.training.transformer import BaseTransformerRecipe, fit_transformer
from kvbench.models.parts.autoencoder import Size
from kvbench.models.parts.text import VocabularyConfig, VocabularyEncoder


def draw_pictures() -> Tensor:
    """Eight images of noise, uint8 [8, 16, 16, 3]."""
    return torch.randint(256, (8, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def make_text_encoder() -> VocabularyEncoder:
    """A text encoder of nine words."""
    return VocabularyEncoder(VocabularyConfig(words=9, longest=5, width=16, layers=1, heads=2))


def move_all(network: nn.Module) -> None:
    """Move every parameter away from the start that training gives it."""
    rng = torch.Generator().manual_seed(4)
    for parameter in network.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=rng))


def check_resumed(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    draw: Callable[[int], Sequence[object]],
    recipe: BaseTransformerRecipe,
    folder: Path,
    rate: Callable[[int], float] | None = None,
) -> None:
    """Train six steps at once, and again cut off before the last; in the end every parameter has moved.

    `draw` gives the arguments of a step, and every second step takes a checkpoint.
    """
    monkeypatch.setattr("kvbench.extras.training.loop.CHECKPOINT_EVERY", 2)

    def interrupted(step: int) -> Sequence[object]:
        if step == 5:
            raise KeyboardInterrupt
        return draw(step)

    def run(drawn: Callable[[int], Sequence[object]], name: str) -> dict[str, Tensor]:
        return fit_transformer(make(), drawn, recipe, folder / f"{name}.safetensors", rate, compiled=False)

    whole = run(draw, "whole")
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, "cut")
    resumed, start = run(draw, "cut"), dict(make().named_parameters())
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [name for name, p in start.items() if torch.equal(p, whole[name])] == []


def check_tokenizer(
    network: nn.Module,
    recipe: AutoencoderRecipe[Any],
    sizes: Sequence[Size],
    folder: Path,
    fixed: Collection[str] = (),
) -> None:
    """Train a tokenizer and load its averaged weights; all parameters move but those that are fixed."""
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    loss = recipe.make_loss(network, draw_pictures(), sizes, compiled=False)
    weights = fit("tokenizer", network, recipe, loss, folder / "tokenizer.safetensors")
    assert {name for name, p in network.named_parameters() if torch.equal(p, before[name])} == {*fixed}
    network.load_state_dict(weights)


def check_traced(network: nn.Module, *arguments: object) -> None:
    """Hold a network's loss and gradients as a compiler traces them against those of a plain call."""
    losses, gradients = [], []
    for called in (network, torch.compile(network, backend="eager", dynamic=False, fullgraph=True)):
        network.zero_grad()
        loss = called(*arguments)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
