"""TriAttention: scores of keys by calibrated centres of queries and by distance (arXiv:2604.04921)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_sinks, find_valid_queries, fits
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

TEXT_HORIZON = 65536
"""Maximum distance of a future query in the paper's runs on texts."""


@dataclass
class QueryCentres(Observer):
    """Calibration of each head's mean queries before rotation, as complex numbers of the channel pairs that rotate.

    Tensors are float64 [L, H, G, D/2], G query heads for each of H KV heads: `centre_real` and `centre_imag`, the mean
    E[q], and `modulus`, the mean E[|q|]. Queries are as in attention, without 1/sqrt(D). The means are over all prompt
    and generated tokens of conditional sequences. The paper takes some 32 thousand tokens of any text.
    """

    kind: ClassVar[str] = "query_centres"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, [L, H, G, D/2]."""
        shape = (spec.layers, spec.heads, spec.group, spec.head_dim // 2)
        return dict.fromkeys(("centre_real", "centre_imag", "modulus"), shape)

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero."""
        super().prepare(spec)
        self._tokens = 0

    def accumulate(self, view: View) -> None:
        """Add the segment's queries to the sums."""
        segment = view.segment
        chosen = torch.arange(segment.length)
        pairs = view_pairs(view.queries(chosen) / self.spec.logit_scale)
        rotation = view.rotation(segment.start + chosen)
        if rotation is not None:
            pairs = pairs * rotation.conj()
        valid = find_valid_queries(view, chosen)
        if valid is None:
            valid = torch.ones(len(pairs), segment.length, device=pairs.device)
        else:
            pairs = pairs * valid[:, None, :, None]
        if view.layer == 0:
            self._tokens += int(self.select_conditional(valid)[:, 0].sum())
        statistics = {"centre_real": pairs.real, "centre_imag": pairs.imag, "modulus": pairs.abs()}
        for name, values in statistics.items():
            self.sums[name][view.layer] += self.select_conditional(values.double().sum(2)).sum(0)

    def average(self) -> dict[str, Tensor]:
        """Return the means over all tokens, by name; zeros without tokens."""
        return {name: sums / max(self._tokens, 1) for name, sums in self.sums.items()}


@dataclass
class TriAttention(Scored):
    """Keep the prompt and the keys that future queries would attend to, if they equalled the calibrated centres.

    Before rotation, the queries of a head are close to a centre. The score of a key for a query at this centre is a
    trigonometric series of their distance; its mean over distances 1, 2, 4, ... is the key's value to future queries.
    The deviation of queries from the centre adds at most a product of norms (section 4.2). A key's score is the sum of
    both, standardised over the row, with a maximum over the query heads that share the key.

    The mean over distances is one product with the cached key: future rotations are averaged into a virtual query once
    per segment, in float64. No query of the run is read.

    The published runs decide for all layers at once (`shared=layers`): standardised scores are averaged over layers,
    and all layers keep the same tokens of a KV head. With `none`, an option of the released code, each layer decides
    separately.

    Differs from the released code in: queries are calibrated after the query norm, on texts that the model generates.
    The earlier token wins a tie, without noise. A prompt that fills the budget is refused, while the code keeps only
    its beginning. If tokens rotate with row and column, the distances are to the image's future tokens.

    Attributes:
        horizon: maximum distance; distances are the powers of two up to it. None for 65536 in texts, and for the number
            of future tokens in images.
        aggregate: `mean` or `max` over distances.
        normalize: standardise the scores of each query head over the evictable slots.
        group: `max` or `mean` over the query heads that share a KV head.
        shared: `none`; `layers`, all layers keep the same tokens; `all`, all heads of all layers do.
        trig: use the series; False uses norms only.
        concentration: subtract the centre's norm from the mean norm of queries; False uses the whole mean norm.
        recent: newest tokens that are always kept.
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
    def uses(self) -> Uses:
        """`Scored.uses`, with a joint decision if layers keep the same tokens."""
        return replace(super().uses, joint=self.shared != "none")

    @property
    def uniform_capacity(self) -> bool:
        """Whether heads choose for themselves, so that `assign_capacities` can replace their even shares."""
        return self.shared == "none"

    def needs(self) -> Observer | Path:
        """Return the calibration of the query centres."""
        return QueryCentres()

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the number of newest tokens that are kept, at least one: a prompt must not fill the budget."""
        return max(self.recent, 1)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Read the centres and the mean norms of deviations."""
        super().prepare(spec, budget, artifact)
        if self.shared != "none":  # layers that keep the same tokens have the same capacity
            self._capacities = [budget.head_tokens] * spec.layers
        tensors = require_artifact(artifact, "method=triattention:")
        self._centres = torch.complex(tensors["centre_real"].double(), tensors["centre_imag"].double())
        deviation = tensors["modulus"].double() - (self._centres.abs() if self.concentration else 0)
        self._deviation = deviation.float()

    def compare_layers(self, views: Sequence[View]) -> None:
        """Score the slots of all layers, which contain the same tokens."""
        if fits(views[0], self.min_capacity(views[0])) and not self.keeps_scores:
            return
        layers = torch.stack([self._score_layer(view) for view in views])
        if self.shared == "layers":
            self._scores = layers.mean(0)
            return
        # The tokens of highest maximum include the best tokens of each head, so no union is needed.
        heads = layers.amax(0).unflatten(0, (-1, views[0].heads))
        self._scores = heads.amax(1, keepdim=True).expand_as(heads).flatten(0, 1)

    def score(self, view: View) -> Tensor:
        """Return the value of each key to future queries, infinity for the newest tokens: float32 [rows, slots]."""
        scores = self._score_layer(view) if self.shared == "none" else self._scores
        return scores.masked_fill(view.position >= view.segment.end - self.recent, torch.inf)

    def _score_layer(self, view: View) -> Tensor:
        """Return the scores of one layer, float32 [rows, slots]."""
        scores = self.score_heads(view)
        if self.normalize:
            evictable = (view.position >= 0) & ~find_sinks(view, self.sinks, self.leading)
            scores = standardise(scores, evictable[:, None])
        return scores.amax(1) if self.group == "max" else scores.mean(1)

    def score_heads(self, view: View) -> Tensor:
        """Return the score of each key for each query head before standardisation, float32 [rows, G, slots]."""
        device, layer = view.position.device, view.layer
        keys = view.cached_keys().float().unflatten(0, (-1, view.heads))
        deviation = self._deviation[layer].to(device, non_blocking=True)
        scores = view_pairs(keys).abs() @ deviation.mT  # [sequences, heads, slots, G]
        if self.trig:
            rotations = self._find_rotations(view)
            if self.aggregate == "mean":
                rotations = rotations.mean(0, keepdim=True)
            virtual = [torch.view_as_real(self._centres[layer] * rotation) for rotation in rotations]
            queries = [q.flatten(-2).float().to(device, non_blocking=True) for q in virtual]
            series = [keys @ q.mT for q in queries]
            scores = scores + (series[0] if len(series) == 1 else torch.stack(series).amax(0))
        return scores.flatten(0, 1).mT

    def _find_rotations(self, view: View) -> Tensor:
        """Return the rotations of future queries, complex128 [distances, D/2]."""
        spec, start = self.spec, view.segment.end
        future = spec.segments[-1].end - start
        in_text = spec.rope_base > 0 and not spec.line
        horizon = self.horizon or (TEXT_HORIZON if in_text else future)
        if spec.rope_base == 0:  # such a model's table of rotations ends with the image
            horizon = min(horizon, future)
        positions = start + list_distances(horizon)
        if spec.rope_base:
            angles = (spec.origin + positions[:, None]) * find_frequencies(spec, view.layer)
            return torch.polar(torch.ones_like(angles), angles)
        rotation = view.rotation(positions)
        if rotation is None:
            return torch.ones(1, spec.head_dim // 2, dtype=torch.complex128)
        return rotation.cpu().to(torch.complex128)


def find_frequencies(spec: ModelSpec, layer: int) -> Tensor:
    """Return the rotary frequency of each pair of channels of 1D RoPE, float64 [D/2]; 0 in a layer without RoPE."""
    half = torch.arange(spec.head_dim // 2, dtype=torch.float64)
    if layer in spec.unrotated:
        return torch.zeros_like(half)
    if spec.rope_frequencies:
        return torch.tensor(spec.rope_frequencies, dtype=torch.float64)
    return spec.rope_base ** (-2 * half / spec.head_dim)


def list_distances(horizon: int) -> Tensor:
    """Return the powers of two up to a horizon, int64.

    >>> list_distances(10).tolist()
    [1, 2, 4, 8]
    """
    return 2 ** torch.arange(max(horizon, 1).bit_length())


def view_pairs(x: Tensor) -> Tensor:
    """Return channels [..., D] as the complex numbers that rotate, complex64 [..., D/2]."""
    return torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())


def standardise(scores: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean over the slots of a mask, and divide by their standard deviation, at least 1e-6.

    Scores and result are [..., slots]; the mask is bool, broadcastable to them.
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    centred = scores - (scores * mask).sum(-1, keepdim=True) / count
    deviation = ((centred.square() * mask).sum(-1, keepdim=True) / count).sqrt()
    return centred / deviation.clamp(min=1e-6)
