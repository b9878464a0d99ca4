"""PriceKV by score: calibrated capacities of heads, filled with the tokens that another method scores highest."""

from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.curves import keep_best, list_capacities, measure_errors, scatter_to_positions
from kvbench.methods.pricekv.greedy import allocate_calibrated, choose_floor
from kvbench.methods.shared.base import Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import count_sinks
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass
class ScoreErrors(Observer):
    """Calibrates the error of heads that hold only the tokens that another method scores highest.

    The tensor `error` is float64 [L, H, segments, capacities]: the squared error of attention's output at each segment
    but the first if a head keeps, after every segment, the tokens of highest score among those it still has, up to a
    capacity (`curves.list_capacities`). Texts have one curve for all segments, since they may end at any length. Scores
    are computed on the full cache, with the same capacity for all heads. If the base has a calibration, a first pass
    makes it, and its tensors are added to the artifact.

    Attributes:
        base: the method that scores.
        queries: number of evenly spaced queries of each segment.
    """

    base: Scored
    queries: int = 64

    kind: ClassVar[str] = "score_errors"

    def __repr__(self) -> str:
        """Return the settings that name a calibration; first tokens that never leave are named if there are any."""
        leading = f", leading={self.base.leading}" if self.base.leading else ""
        return f"ScoreErrors(base={self.base!r}, queries={self.queries}{leading})"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `error` and of the base's calibration."""
        needs = self.base.needs()
        of_base = needs.tensor_shapes(spec) if isinstance(needs, Observer) else {}
        curves = 1 if spec.writes_text else len(spec.segments) - 1
        return {**of_base, "error": (spec.layers, spec.heads, curves, len(list_capacities(spec)))}

    @property
    def uses(self) -> Uses:
        """Requirements of the base's calibration."""
        needs = self.base.needs()
        return needs.uses if isinstance(needs, Observer) else Uses()

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero, and start the base's calibration if it has one."""
        super().prepare(spec)
        self._capacities = list_capacities(spec)
        self._bases: list[Scored] = []
        self._masks: dict[int, list[Tensor]] = {}
        self._states: dict[int, Tensor] = {}
        needs = self.base.needs()
        self._observer = needs if isinstance(needs, Observer) else None
        if self._observer is None:
            self._prepare_bases(None)
        else:
            self._observer.prepare(spec)

    def accumulate(self, view: View) -> None:
        """Run the base's calibration; in the last pass, add the errors and update the masks."""
        if not self._bases and self._observer is not None:
            self._observer.observe(view)
            return
        if view.segment.index:
            errors = measure_errors(view, self._masks[view.layer], self.queries, 1)
            curve = 0 if self.spec.writes_text else view.segment.index - 1
            self.sums["error"][view.layer, :, curve] += errors / self.spec.branches
        if not view.segment.last:
            self._evict(view)

    def look_again(self) -> bool:
        """Return whether the base's calibration just ended or needs another pass."""
        if self._observer is None or self._bases:
            return False
        if not self._observer.look_again():
            self._prepare_bases(Artifact(self._observer.kind, self._observer.average()))
            self._prompts = 0
        return True

    def average(self) -> dict[str, Tensor]:
        """Return the mean errors over prompts and the tensors of the base's calibration."""
        return super().average() | ({} if self._observer is None else self._observer.average())

    def _prepare_bases(self, artifact: Artifact | None) -> None:
        """Prepare a copy of the base for each capacity, or for its smallest feasible one."""
        spec, minimum = self.spec, find_min_capacity(self.base, self.spec)
        for capacity in self._capacities:
            tokens, base = max(capacity, minimum) * spec.all_heads, deepcopy(self.base)
            base.prepare(spec, Budget(Fraction(tokens), spec.full_tokens, spec.all_heads), artifact)
            self._bases.append(base)

    def _evict(self, view: View) -> None:
        """Update the mask of positions of each capacity, bool [rows, c_k]."""
        first = view.segment.index == 0
        if self.base.uses.state:
            state = view.position.new_zeros(len(view.position), view.segment.end, dtype=torch.float32)
            if not first:
                state[:, : view.segment.start] = self._states[view.layer]
            view.state = state.gather(1, view.position.clamp(min=0))
            self._bases[0].observe(view)
            self._states[view.layer] = scatter_to_positions(view.state, view)
        exists = scatter_to_positions((view.position >= 0).float(), view).bool()
        before = [None] * len(self._bases) if first else self._masks[view.layer]
        self._masks[view.layer] = [
            exists if capacity >= view.segment.end else keep_best(_rank(base, view, exists), mask, capacity)
            for base, mask, capacity in zip(self._bases, before, self._capacities, strict=True)
        ]


def _rank(base: Scored, view: View, exists: Tensor) -> Tensor:
    """Return a base's scores by position, float32 [rows, c_k]; -inf without a slot."""
    return scatter_to_positions(base.ranked_scores(view), view).masked_fill(~exists, -torch.inf)


def find_min_capacity(base: Scored, spec: ModelSpec) -> int:
    """Return the smallest capacity with which a method works."""
    return max(1, count_sinks(spec, base.sinks, base.leading) + base.count_reserved(spec))


@dataclass
class PriceKVByScore(Wrapper):
    """Allocate capacity to heads by their calibrated error, and keep the tokens that the base scores highest.

    A method of this project, PriceKV for texts; loss curves of heads on full caches, their hulls and the greedy sale
    are LU-KV's (arXiv:2602.08585), whose loss sums attention and which compresses a prompt once. In texts positions
    have no fixed role, but heads do: some attend to the newest tokens only, others anywhere. The calibration measures,
    on full caches of other prompts, the error of attention's output if a head holds a number of the tokens of highest
    score (`ScoreErrors`). Capacity is allocated after every segment in the order of error saved per token
    (`greedy.allocate_capacities`), and the base chooses the tokens. It also works for images, where positions predict
    more (`pricekv/by_token`).

    Attributes:
        floor: minimum capacity of a head, at most B / T and at least what the base needs; null for
            `greedy.choose_floor`, which gives 16 for texts.
        price_decay: discount of the error per segment in the cost of a capacity.
        queries: number of evenly spaced queries of each segment in the calibration.
        calibration_prompts: default of `calibrate.count`.

    Raises:
        ConfigError: the base allocates capacity among heads or layers itself, or does not score every segment.
    """

    floor: int | None = None
    price_decay: float = 0.8
    queries: int = 64
    calibration_prompts: int = 10

    own_text_revision: ClassVar[int] = 1  # capacities were for the longest prompt
    limits = set_limits(
        floor=Limit(1), price_decay=Limit(0, 1), queries=Limit(1), calibration_prompts=Limit(1)
    )

    def __post_init__(self) -> None:
        """Refuse bases with capacities of their own."""
        super().__post_init__()
        name = type(self.base).__name__
        if not self.base.uniform_capacity:
            raise ConfigError(
                f"method.base: {name} shares capacity among heads or layers itself; choose a base with equal "
                "capacities, as method.base=h2o"
            )
        if self.refresh > 1 or self.ema:
            raise ConfigError(
                "method.base.refresh, method.base.ema: the calibration needs scores of every segment; set "
                "method.base.refresh=1 method.base.ema=0"
            )
        if not isinstance(self.base.needs(), Observer | None):
            raise ConfigError(f"method.base: {name} reads a file; choose a base that does not")

    @property
    def heads_independent(self) -> bool:
        """False: heads of all layers share B."""
        return False

    def needs(self) -> ScoreErrors:
        """Return the calibration of the errors, which includes the base's calibration."""
        return ScoreErrors(self.base, self.queries)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Allocate the capacity to the base's heads."""
        super().prepare(spec, budget, artifact)
        error = require_artifact(artifact, "method=pricekv/by_score:")["error"]
        floor = max(self.floor or choose_floor(spec, budget), find_min_capacity(self.base, spec))
        measured = list_capacities(self.calibrated_spec)
        self.capacities = allocate_calibrated(
            error, measured, spec, budget, floor=floor, decay=self.price_decay
        )
        self.base.assign_capacities(self.capacities)
