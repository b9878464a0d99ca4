"""Calibration of the prediction of a scale from the scale before: factors, energies and codebooks of differences."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.coding.codebooks import BITS, fit_books, list_shapes
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.view import View

SIDES = ("keys", "values")
MENU_BITS = (1, *BITS)
"""Widths of codes with codebooks that a method's precisions may have where scales are predicted."""
MOMENTS = ("energy", "plain", "cross", "square")
ENERGIES = ("energy", "plain", "predicted")
"""Sums of squares of a scale: of its numbers, around the mean of each channel, and of the difference to the prediction
around the mean of each channel."""


def list_parents(before: Segment, segment: Segment) -> tuple[Tensor, Tensor]:
    """Return the tokens from which each token of a scale is interpolated, and their weights.

    Interpolation is bilinear between the centres of tokens, as `torch.nn.functional.interpolate` does without
    `align_corners`.

    Args:
        before: the scale before.
        segment: the scale.

    Returns:
        int64 [tokens, 4], indices among the tokens of `before`; float32 [tokens, 4], which sum to 1.
    """

    def find_neighbours(few: int, many: int) -> tuple[Tensor, Tensor]:
        centre = ((torch.arange(many) + 0.5) * (few / many) - 0.5).clamp(0, few - 1)
        low = centre.floor().long()
        part = centre - low
        return torch.stack((low, (low + 1).clamp(max=few - 1)), 1), torch.stack((1 - part, part), 1)

    rows, row_weights = find_neighbours(before.height, segment.height)
    columns, column_weights = find_neighbours(before.width, segment.width)
    parents = rows[:, None, :, None] * before.width + columns[None, :, None]
    weights = row_weights[:, None, :, None] * column_weights[None, :, None]
    return parents.reshape(-1, 4), weights.reshape(-1, 4)


def interpolate(x: Tensor, parents: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of four tokens, float32 [batch, ..., D].

    The terms are added in a fixed order, so that a token gets the same bits in every layout.

    Args:
        x: float32 [batch, tokens, D].
        parents: int64 [..., 4], tokens.
        weights: float32 [..., 4].
    """
    total = torch.zeros(len(x), *parents.shape[:-1], x.shape[2], device=x.device)
    for corner in range(4):
        total += x[:, parents[..., corner]] * weights[..., corner, None]
    return total


def share_energies(tensors: Mapping[str, Tensor], side: str) -> tuple[list[float], list[float]]:
    """Return plain and predicted energy of each scale as shares of its energy, all layers and heads together.

    Args:
        tensors: calibration of `ScaleResiduals`.
        side: `keys` or `values`.
    """
    energy, plain, predicted = (tensors[f"{side}_{name}"].sum((0, 1)) for name in ENERGIES)
    return (plain / energy).tolist(), (predicted / energy).tolist()


@dataclass
class ScaleResiduals(Observer):
    """Measures how well a scale is predicted by the scale before, and fits codebooks to the differences.

    A scale is predicted by the scale before in the same layer and head, interpolated to its size and multiplied by the
    factor of least squares around the means of each channel. Where the energy of the difference is not below
    `threshold` times the plain energy, the factor is 0. A scale after a single token is not predicted, because its
    prediction would be the same for all tokens.

    Attributes:
        tokens: evenly spaced tokens of each scale and sequence that are sampled for codebooks.
        augmented: further numbers of each channel for every level of its codebook (`augment_samples`).
        threshold: largest share of the plain energy at which a scale is predicted.
        codebooks: fit codebooks; otherwise only factors and energies are calibrated.
        bits: widths of codes with levels.
    """

    tokens: int = 32
    augmented: int = 64
    threshold: float = 0.7
    codebooks: bool = True
    bits: tuple[int, ...] = BITS
    _seen: dict[tuple[str, int, int], list[tuple[int, Tensor, Tensor]]] = field(
        default_factory=dict, init=False, repr=False
    )

    kind: ClassVar[str] = "scale_residuals"

    def prepare(self, spec: ModelSpec) -> None:
        """Drop all sampled tokens and sums."""
        super().prepare(spec)
        self._seen.clear()
        shape = (spec.layers, spec.heads, len(spec.segments) - 1)
        self.sums = {
            f"{side}_{moment}": torch.zeros(shape, dtype=torch.float64)
            for side in SIDES
            for moment in MOMENTS
        }

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of codebooks, and of factors and energies [L, H, K - 1].

        Codebooks have the names of `Codebooks`; codebooks of differences have the suffix `_residual`.
        """
        books = list_shapes(spec, self.bits) if self.codebooks else {}
        shape = (spec.layers, spec.heads, len(spec.segments) - 1)
        return (
            books
            | {f"{name}_residual": size for name, size in books.items()}
            | {f"{side}_{name}": shape for side in SIDES for name in ("factor", *ENERGIES)}
        )

    def accumulate(self, view: View) -> None:
        """Add the moments of a scale and its prediction; for codebooks store some of their tokens in float16."""
        segment = view.segment
        if segment.last:
            return
        count = min(self.tokens, segment.length)
        chosen = torch.arange(count) * segment.length // count
        before = self.spec.segments[segment.index - 1] if segment.index else None
        cached = [view.cached_keys(rotated=False), view.cached_values()] if before is not None else []
        for number, (side, x) in enumerate(
            zip(SIDES, (view.keys(rotated=False), view.values()), strict=True)
        ):
            x, guess = x.float(), torch.zeros_like(x, dtype=torch.float32)
            if before is not None and before.length > 1:
                parents, weights = (part.to(x.device) for part in list_parents(before, segment))
                guess = interpolate(cached[number][:, before.start : before.end].float(), parents, weights)
            self._add(side, view, x, guess)
            if not self.codebooks:
                continue
            some = chosen.to(x.device, non_blocking=True)
            pair = (part.index_select(1, some) for part in (x, guess))
            heads = [part.unflatten(0, (-1, view.heads)).transpose(0, 1).flatten(1, 2) for part in pair]
            found = (self._prompts, heads[0].half().cpu(), heads[1].half().cpu())
            self._seen.setdefault((side, view.layer, segment.index), []).append(found)

    def _add(self, side: str, view: View, x: Tensor, guess: Tensor) -> None:
        centred, guessed = (part - part.mean(1, keepdim=True) for part in (x, guess))
        products = {
            "energy": x * x,
            "plain": centred * centred,
            "cross": centred * guessed,
            "square": guessed * guessed,
        }
        for name, product in products.items():
            rows = product.sum((1, 2), dtype=torch.float64).unflatten(0, (-1, view.heads))
            self.sums[f"{side}_{name}"][view.layer, :, view.segment.index] += rows.sum(0).cpu()

    def average(self) -> dict[str, Tensor]:
        """Return factors, energies per prompt, and codebooks; zeros without tokens."""
        return self.fit()

    def fit(self, without: Container[int] = ()) -> dict[str, Tensor]:
        """Return `average` with codebooks that are not fitted to some batches, counted from 1."""
        shapes = self.tensor_shapes(self.spec)
        found = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
        for side in SIDES:
            energy, plain, cross, square = (self.sums[f"{side}_{moment}"] for moment in MOMENTS)
            factor = torch.where(square > 0, cross / square, 0)
            predicted = plain - factor * cross
            factor = factor.where(predicted < self.threshold * plain, 0)
            found[f"{side}_factor"] = factor.float()
            for name, sums in zip(ENERGIES, (energy, plain, predicted), strict=True):
                found[f"{side}_{name}"] = sums / max(self._prompts, 1)
        for (side, layer, source), parts in self._seen.items():
            tokens = [part[1:] for part in parts if part[0] not in without]
            x, guess = (torch.cat(some, 1).mT.float() for some in zip(*tokens, strict=True))
            factor = found[f"{side}_factor"][layer, :, source, None, None]
            for ending, samples in (("", x), ("_residual", x - factor * guess)):
                for bits, book in fit_books(samples, self.augmented, self.bits).items():
                    found[f"{side}_{bits}{ending}"][layer, :, source] = book
        return found

    def make_stand_in(self, spec: ModelSpec) -> Artifact:
        """Make factors, and codebooks of ascending random numbers, for timing only."""
        made = super().make_stand_in(spec)
        books = {
            f"{side}_{bits}{end}" for side in SIDES for bits in (*self.bits, 8) for end in ("", "_residual")
        }
        tensors = {
            name: x.sort(-1).values.half() if name in books else x.float() for name, x in made.tensors.items()
        }
        return Artifact(self.kind, tensors)
