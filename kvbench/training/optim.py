"""Muon for hidden matrices and AdamW for the rest with one learning-rate factor, and averaged weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class Optimizer:
    """Muon and AdamW in one step.

    Muon (orthogonalised momentum) updates the parameters of two or more dimensions whose names `hidden` accepts;
    convolution kernels [out, in, h, w] as matrices [out, in*h*w]. AdamW updates the others. `muon` and `adamw` are the
    peak learning rates, `decay` is the weight decay of Muon.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden: Callable[[str], bool],
        *,
        muon: float,
        adamw: float,
        decay: float = 0.0,
    ) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and hidden(name)]
        matrix_ids = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in matrix_ids]
        # Muon needs two dimensions. `view`, not `flatten`, which would train a copy of a channels-last kernel.
        self._pairs = [(p, nn.Parameter(p.data.view(len(p), -1))) for p in matrices]
        self._muon = torch.optim.Muon([flat for _, flat in self._pairs], lr=muon, weight_decay=decay)
        self._adamw = torch.optim.AdamW(rest, lr=adamw, betas=(0.9, 0.97), weight_decay=0.0)
        self._peak = (muon, adamw)
        self._parameters = [*matrices, *rest]

    def step(self, factor: float) -> None:
        """Clip gradients to a total norm of 1, update at `factor` times the peak rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for parameter, flat in self._pairs:
            flat.grad = None if parameter.grad is None else parameter.grad.flatten(1)
        for optimizer, peak in zip((self._muon, self._adamw), self._peak, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors of both optimisers by flat names, for a checkpoint."""
        return {
            f"{label}.{index}.{key}": torch.as_tensor(value)
            for label, optimizer in (("muon", self._muon), ("adamw", self._adamw))
            for index, entry in optimizer.state_dict()["state"].items()
            for key, value in entry.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that `state` returned."""
        for label, optimizer in (("muon", self._muon), ("adamw", self._adamw)):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                kind, index, key = name.split(".", 2)
                if kind == label:
                    state.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


class Average:
    """Exponential moving average of a module's parameters, with a decay in [0, 1).

    Attributes:
        tensors: averaged parameters by name; before the first update the parameters themselves.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = dict(model.named_parameters())
        self.tensors = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the parameters after a step, counted from 0.

        The decay is at most (1 + step) / (10 + step), so that the first steps discard the random start.
        """
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), [p.data for p in self._live.values()], weight)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy averaged parameters by name in place."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)


def warm_hold_decay(
    step: int, progress: float, *, warm: int = 40, hold: float = 0.4, floor: float = 0.02
) -> float:
    """Return the learning-rate factor of a step.

    It rises linearly over the first `warm` steps, stays at 1 until the share `progress` of the training reaches `hold`,
    then falls linearly to `floor`.
    """
    if step < warm:
        return (step + 1) / warm
    return 1.0 if progress < hold else max(floor, floor + (1 - floor) * (1 - progress) / (1 - hold))
