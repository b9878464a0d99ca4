"""Muon for hidden matrices, AdamW for all other parameters, averaged weights, and the dtype of matrix products."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
"""Decay of Muon's momentum per step."""
WARM_UP = 40
"""Number of steps over which the learning rate rises."""
FLOOR = 0.02
"""Learning-rate factor at the end of a training."""


def choose_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float32 for processors without AVX512, whose products in bfloat16 are ten times slower."""
    slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")
    return torch.float32 if slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """Return a context for passes whose matrix products have the dtype of `choose_dtype`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=choose_dtype(device) is torch.bfloat16)


class Optimizer:
    """Muon and AdamW in one step.

    Muon (orthogonalised momentum with Nesterov's look-ahead) updates the parameters of two or more dimensions whose
    names `hidden` accepts; convolution kernels [out, in, h, w] are matrices [out, in*h*w]. AdamW updates all other
    parameters. `muon` and `adamw` are the peak learning rates, `decay` is the weight decay of Muon. `torch.optim.Muon`
    has the same rule, but multiplies in bfloat16 on every device.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden: Callable[[str], bool],
        *,
        muon: float,
        adamw: float,
        decay: float,
    ) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and hidden(name)]
        matrix_ids = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in matrix_ids]
        # `view`, not `flatten`, which would train a copy of a channels-last kernel.
        self._pairs = [(p, p.data.view(len(p), -1)) for p in matrices]
        self._momenta = [torch.zeros_like(flat) for _, flat in self._pairs]
        self._adamw = torch.optim.AdamW(rest, lr=adamw, betas=(0.9, 0.97), weight_decay=0.0)
        self._muon, self._peak, self._decay = muon, adamw, decay
        self._parameters = [*matrices, *rest]

    def step(self, factor: float) -> None:
        """Clip gradients to a total norm of 1, update at `factor` times the peak rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._update_matrices(self._muon * factor)
        for group in self._adamw.param_groups:
            group["lr"] = self._peak * factor
        self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _update_matrices(self, rate: float) -> None:
        """Update matrices in groups of one shape, whose products are computed together."""
        groups = defaultdict(list)
        for (parameter, flat), momentum in zip(self._pairs, self._momenta, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.flatten(1)
                momentum.lerp_(gradient, 1 - MOMENTUM)
                groups[flat.shape].append((flat, gradient.lerp(momentum, MOMENTUM)))
        for (rows, columns), members in groups.items():
            updates = orthogonalise(torch.stack([update for _, update in members]))
            for (flat, _), update in zip(members, updates, strict=True):
                flat.mul_(1 - rate * self._decay)
                flat.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors of both rules by flat names, for a checkpoint."""
        momenta = {f"muon.{index}": momentum for index, momentum in enumerate(self._momenta)}
        return momenta | {
            f"adamw.{index}.{key}": torch.as_tensor(value)
            for index, entry in self._adamw.state_dict()["state"].items()
            for key, value in entry.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that `state` returned."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, index, *key = name.split(".")
            if kind == "muon":
                self._momenta[int(index)].copy_(tensor)
            else:
                state.setdefault(int(index), {})[key[0]] = tensor
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": state})


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices [n, rows, columns] with singular values near 1, in the dtype of `choose_dtype`.

    It takes five steps of the Newton-Schulz iteration of degree five (K. Jordan and others, Muon, 2024).
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).to(choose_dtype(matrices.device))
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x if wide else x.mT


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Move averages of all parameters of a module, in its order, towards the parameters after step `step`, from 0.

    The decay is at most (1 + step) / (10 + step), so that the first steps discard the random start.
    """
    weight = 1 - min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.values()), [p.data for p in model.parameters()], weight)


def warm_hold_decay(step: int, progress: float, hold: float) -> float:
    """Return the learning-rate factor of a step.

    It rises linearly over the first `WARM_UP` steps, stays at 1 until the share `progress` of the training reaches
    `hold`, then falls linearly to `FLOOR`.
    """
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 1.0 if progress < hold else max(FLOOR, FLOOR + (1 - FLOOR) * (1 - progress) / (1 - hold))
