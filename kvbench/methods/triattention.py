"""TriAttention: keys scored by calibrated centres of queries and by distance, without a query (arXiv:2604.04921)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.base import Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.capabilities import DecidesJointly
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_sinks, find_valid_queries, fits
from kvbench.methods.shared.view import View

TEXT_HORIZON = 65536
"""Largest distance of a future query in the paper's runs on texts."""


@dataclass
class QueryCentres(Observer):
    """Calibrates where the queries of a head lie before the rotation, as complex numbers of the pairs that rotate.

    Tensors are float64 [L, H, G, D/2], G query heads for each of H KV heads: `centre_real` and `centre_imag`, the mean
    E[q], and `modulus`, the mean E[|q|]. Queries are taken as attention multiplies them, without 1/sqrt(D), and the
    means are over all tokens of all prompts and of what was drawn after them, conditional sequences only. The paper
    takes some 32 thousand tokens of any text.
    """

    kind: ClassVar[str] = "query_centres"
    families: ClassVar[tuple[Family, ...]] = ("next-token",)

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, H, G, D/2] of each tensor."""
        shape = (spec.layers, spec.heads, spec.group, spec.head_dim // 2)
        return dict.fromkeys(("centre_real", "centre_imag", "modulus"), shape)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero."""
        super().prepare(spec, budget, artifact)
        self._tokens = 0

    def accumulate(self, view: View) -> None:
        """Add the segment's queries."""
        segment = view.segment
        chosen = torch.arange(segment.length)
        pairs = view_pairs(view.queries(chosen) / self.spec.logit_scale)
        rotation = view.rotation(segment.start + chosen)
        if rotation is not None:
            pairs = pairs * rotation.conj()
        asking = find_valid_queries(view, chosen)
        if asking is not None:
            pairs = pairs * asking[:, None, :, None]
        if view.layer == 0:
            exist = pairs.new_ones(len(pairs), segment.length).real if asking is None else asking
            self._tokens += int(self.select_conditional(exist)[:, 0].sum())
        found = {"centre_real": pairs.real, "centre_imag": pairs.imag, "modulus": pairs.abs()}
        for name, values in found.items():
            self.sums[name][view.layer] += self.select_conditional(values.double().sum(2)).sum(0)

    def average(self) -> dict[str, Tensor]:
        """Return the means over the tokens seen, by name; zeros when none were."""
        return {name: sums / max(self._tokens, 1) for name, sums in self.sums.items()}


@dataclass
class TriAttention(DecidesJointly, Scored):
    """Keep the prompt and the keys that queries to come would attend to, were they where the calibration found them.

    Before the rotation the queries of a head lie near a centre. The score of a key for a query at that centre is then a
    trigonometric series of their distance, whose mean over distances 1, 2, 4, ... says what the key is worth to queries
    to come. Queries off the centre add at most a product of norms (section 4.2). A key's score is the sum of both,
    standardised over the row, the maximum over the query heads that share the key.

    The mean over distances is one product with the cached key: the rotations to come are averaged into a virtual query
    once per segment, in float64. No query of the run is looked at.

    The published runs decide for all layers at once (`shared=layers`): standardised scores are averaged over layers,
    and all layers keep the same tokens of a KV head. `none`, where each layer decides for itself, is an option of the
    released code.

    Differs from the released code in: queries are calibrated behind the query norm, on texts that the model draws.
    Ties are left to the order of the tokens, not to noise. A prompt that fills the budget is refused; the code then
    keeps the beginning of it alone. Where tokens rotate with row and column, the distances are those to the tokens of
    the image that are still to come.

    Attributes:
        horizon: largest distance; distances are the powers of two up to it. None for 65536 in texts, and in images for
            the tokens still to come.
        aggregate: `mean` or `max` over distances.
        normalize: standardise the scores of each query head over the slots that may leave.
        group: `max` or `mean` over the query heads that share a KV head.
        shared: `none`; `layers`, all layers keep the same tokens; `all`, all heads of all layers do.
        trig: use the series; False leaves the norms.
        concentration: subtract the centre's norm from the mean norm of queries; False leaves it whole.
        recent: newest tokens that always stay.
    """

    horizon: int | None = None
    aggregate: Literal["mean", "max"] = "mean"
    normalize: bool = True
    group: Literal["max", "mean"] = "max"
    shared: Literal["none", "layers", "all"] = "none"
    trig: bool = True
    concentration: bool = True
    recent: int = 0

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    revision: ClassVar[int] = 0
    limits = set_limits(
        horizon=Limit(1, wants="must be at least 1, or null for the model's own"), recent=Limit(0)
    )

    @property
    def jointly(self) -> bool:
        """Whether several layers keep the same tokens."""
        return self.shared != "none"

    @property
    def even(self) -> bool:
        """Whether heads keep tokens of their own."""
        return not self.jointly

    def needs(self) -> Observer | Path:
        """Return the calibration of the centres."""
        return QueryCentres()

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the newest tokens that stay, at least one: a prompt must not fill the budget."""
        return max(self.recent, 1)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Read the centres and bound what lies off them."""
        super().prepare(spec, budget, artifact)
        if self.jointly:  # layers that keep the same tokens hold equally many
            self._capacities = [budget.head_tokens] * spec.layers
        tensors = require_artifact(artifact, "method=triattention:")
        self._centres = torch.complex(tensors["centre_real"].double(), tensors["centre_imag"].double())
        off = tensors["modulus"].double() - (self._centres.abs() if self.concentration else 0)
        self._off = off.float()

    def compare(self, views: Sequence[View]) -> None:
        """Score the slots of all layers, which hold the same tokens."""
        if fits(views[0], self.min_capacity(views[0])):
            return
        layers = torch.stack([self._score_layer(view) for view in views])
        if self.shared == "layers":
            self._scores = layers.mean(0)
            return
        # A token among the best of any head is among those of highest maximum, so no union of them is formed.
        heads = layers.amax(0).unflatten(0, (-1, views[0].heads))
        self._scores = heads.amax(1, keepdim=True).expand_as(heads).flatten(0, 1)

    def score(self, view: View) -> Tensor:
        """Return what each key is worth to queries to come, float32 [rows, slots]; infinity for the newest."""
        scores = self._scores if self.jointly else self._score_layer(view)
        return scores.masked_fill(view.position >= view.segment.end - self.recent, torch.inf)

    def _score_layer(self, view: View) -> Tensor:
        """Return the scores of a layer by itself, float32 [rows, slots]."""
        scores = self.score_heads(view)
        if self.normalize:
            open_slots = (view.position >= 0) & ~find_sinks(view, self.sinks)
            scores = standardise(scores, open_slots[:, None])
        return scores.amax(1) if self.group == "max" else scores.mean(1)

    def score_heads(self, view: View) -> Tensor:
        """Return the score of each key for each query head, float32 [rows, G, slots], not standardised."""
        device, layer = view.position.device, view.layer
        keys = view.cached_keys().float().unflatten(0, (-1, view.heads))
        off = self._off[layer].to(device, non_blocking=True)
        scores = view_pairs(keys).abs() @ off.mT  # [sequences, heads, slots, G]
        if self.trig:
            phases = self._find_phases(view)
            virtual = [self._centres[layer] * phase for phase in self._join(phases)]
            queries = [
                torch.view_as_real(q).flatten(-2).float().to(device, non_blocking=True) for q in virtual
            ]
            series = [keys @ q.mT for q in queries]
            scores = scores + (series[0] if len(series) == 1 else torch.stack(series).amax(0))
        return scores.flatten(0, 1).mT

    def _join(self, phases: Tensor) -> Tensor:
        """Return the rotations that make virtual queries: one for all distances, or one for each."""
        return phases.mean(0, keepdim=True) if self.aggregate == "mean" else phases

    def _find_phases(self, view: View) -> Tensor:
        """Return the rotations of the queries to come, complex128 [distances, D/2]."""
        spec, following = self.spec, view.segment.end
        left = spec.segments[-1].end - following
        in_text = spec.rope_base > 0 and not spec.line
        horizon = self.horizon or (TEXT_HORIZON if in_text else left)
        if spec.rope_base == 0:  # the model's table ends with the image
            horizon = min(horizon, left)
        positions = following + list_distances(horizon)
        if spec.rope_base:
            half = torch.arange(spec.head_dim // 2, dtype=torch.float64)
            angles = positions[:, None] * spec.rope_base ** (-2 * half / spec.head_dim)
            return torch.polar(torch.ones_like(angles), angles)
        rotation = view.rotation(positions)
        if rotation is None:
            return torch.ones(1, spec.head_dim // 2, dtype=torch.complex128)
        return rotation.cpu().to(torch.complex128)


def list_distances(horizon: int) -> Tensor:
    """Return the powers of two up to a horizon, int64.

    >>> list_distances(10).tolist()
    [1, 2, 4, 8]
    """
    return 2 ** torch.arange(max(horizon, 1).bit_length())


def view_pairs(x: Tensor) -> Tensor:
    """Return channels [..., D] as the complex numbers that rotate, complex64 [..., D/2]."""
    return torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())


def standardise(scores: Tensor, among: Tensor) -> Tensor:
    """Subtract the mean over some slots and divide by their standard deviation, at least 1e-6: shaped like `scores`.

    Args:
        scores: [..., slots].
        among: bool, broadcastable to `scores`; which slots count.
    """
    count = among.sum(-1, keepdim=True).clamp(min=1)
    centred = scores - (scores * among).sum(-1, keepdim=True) / count
    deviation = ((centred.square() * among).sum(-1, keepdim=True) / count).sqrt()
    return centred / deviation.clamp(min=1e-6)
