"""What every training is asked: that it goes on where it was cut off, and that its network can be compiled."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

Run = Callable[[Path], dict[str, Tensor]]


def check_resumed(monkeypatch: pytest.MonkeyPatch, training: ModuleType, run: Run, folder: Path) -> Path:
    """Run six steps at once, and again cut off before the last; return the finished checkpoint.

    Args:
        monkeypatch: takes a checkpoint every second step.
        training: module whose `draw_batch` is called with the number of the step last.
        run: trains from a checkpoint file.
        folder: of the checkpoint files.
    """
    monkeypatch.setattr("kvbench.training.loop.CHECKPOINT_EVERY", 2)
    whole, draw = run(folder / "whole.safetensors"), training.draw_batch

    def interrupted(*arguments: object) -> object:
        if arguments[-1] == 5:
            raise KeyboardInterrupt
        return draw(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "draw_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(folder / "cut.safetensors")
    resumed = run(folder / "cut.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    return folder / "whole.safetensors"


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
