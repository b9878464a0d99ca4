"""PriceKV by score: priced capacities of heads, filled with the tokens that another method scores highest."""

from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.curves import keep_best, list_capacities, measure_errors, spread_slots
from kvbench.methods.pricekv.sell import choose_floor, sell_by_curves
from kvbench.methods.shared.base import Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.capabilities import is_stateful
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass
class ScoreErrors(Observer):
    """Calibrates what heads lose that hold only the tokens which another method scores highest.

    The tensor `error` is float64 [L, H, segments, capacities]: how far attention's output is off at each segment but
    the first, squared, in heads that hold at most so many tokens (`curves.list_capacities`) after every segment, those
    of the highest scores among what they still have. Texts have one curve for all segments, since they stop at any
    length. Scores are those of the full cache, under an even share of that capacity. A base that is calibrated itself
    is so in a first pass, and its tensors lie beside `error`.

    Attributes:
        base: the method that scores.
        queries: evenly spaced queries of each segment that are looked at.
    """

    base: Scored
    queries: int = 64

    kind: ClassVar[str] = "score_errors"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of `error`, and those of the base's calibration."""
        needs = self.base.needs()
        of_base = needs.tensor_shapes(spec) if isinstance(needs, Observer) else {}
        curves = 1 if spec.writes_text else len(spec.segments) - 1
        return {**of_base, "error": (spec.layers, spec.heads, curves, len(list_capacities(spec)))}

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero, and the base's calibration if it has one."""
        super().prepare(spec, budget, artifact)
        self._capacities = list_capacities(spec)
        self._bases: list[Scored] = []
        self._kept: dict[int, list[Tensor]] = {}
        self._states: dict[int, Tensor] = {}
        needs = self.base.needs()
        self._of_base = needs if isinstance(needs, Observer) else None
        if self._of_base is None:
            self._prepare_bases(None)
        else:
            self._of_base.prepare(spec, budget)

    def accumulate(self, view: View) -> None:
        """Show the base's calibration the layer; in the last pass add the errors, and note what is dropped next."""
        if not self._bases and self._of_base is not None:
            self._of_base.keep(view)
            return
        if view.segment.index:
            errors = measure_errors(view, self._kept[view.layer], self.queries, 1)
            curve = 0 if self.spec.writes_text else view.segment.index - 1
            self.sums["error"][view.layer, :, curve] += errors / self.spec.branches
        if not view.segment.last:
            self._drop(view)

    def look_again(self) -> bool:
        """Return whether the base's calibration just ended, or wants another pass itself."""
        if self._of_base is None or self._bases:
            return False
        if not self._of_base.look_again():
            self._prepare_bases(Artifact(self._of_base.kind, self._of_base.average()))
            self._prompts = 0
        return True

    def average(self) -> dict[str, Tensor]:
        """Return the mean of the errors over prompts, and what the base's calibration found."""
        return super().average() | ({} if self._of_base is None else self._of_base.average())

    def _prepare_bases(self, artifact: Artifact | None) -> None:
        """Prepare the base for each capacity, or the least that it can have."""
        spec, least = self.spec, find_least(self.base, self.spec)
        for capacity in self._capacities:
            tokens, base = max(capacity, least) * spec.all_heads, deepcopy(self.base)
            base.prepare(spec, Budget(Fraction(tokens), spec.full_tokens, spec.all_heads), artifact)
            self._bases.append(base)

    def _drop(self, view: View) -> None:
        """Note which positions each capacity leaves, bool [rows, c_k]."""
        first = view.segment.index == 0
        if is_stateful(self.base):
            state = view.position.new_zeros(len(view.position), view.segment.end, dtype=torch.float32)
            if not first:
                state[:, : view.segment.start] = self._states[view.layer]
            view.state = state.gather(1, view.position.clamp(min=0))
            self._bases[0].observe(view)
            self._states[view.layer] = spread_slots(view.state, view)
        exists = spread_slots((view.position >= 0).float(), view).bool()
        before = [None] * len(self._bases) if first else self._kept[view.layer]
        self._kept[view.layer] = [
            exists if capacity >= view.segment.end else keep_best(_rank(base, view, exists), held, capacity)
            for base, held, capacity in zip(self._bases, before, self._capacities, strict=True)
        ]


def _rank(base: Scored, view: View, exists: Tensor) -> Tensor:
    """Return a base's ranking by position, float32 [rows, c_k], -inf of positions that a row has not."""
    return spread_slots(base.rank(view), view).masked_fill(~exists, -torch.inf)


def find_least(base: Scored, spec: ModelSpec) -> int:
    """Return the tokens that every head must be able to hold under a method."""
    return max(1, spec.leading_tokens(base.sinks) + base.count_reserved(spec))


@dataclass
class PriceKVByScore(Wrapper):
    """Sell capacity to heads by their calibrated error, and fill it with the tokens that the base scores highest.

    A method of this project, PriceKV for texts, whose words stand elsewhere in every prompt, so that no table of
    positions holds. Heads still have stable parts: some look at the newest tokens alone, others look up what stands
    anywhere. The calibration measures, on full caches of other prompts, how far attention's output would be off in a
    head that holds only so many tokens of the highest scores (`ScoreErrors`). Capacity is sold to heads after every
    segment in the order of error saved per token (`sell.allocate_capacities`), and the base chooses within it. It is
    not for texts alone; in an image, positions tell more (`pricekv/by_token`).

    Attributes:
        floor: tokens that every head holds at least; null for what `sell.choose_floor` says, 16 in texts. Never more
            than B / T, never less than the base needs.
        price_decay: what a later segment counts in the worth of a capacity beside the one before it.
        queries: evenly spaced queries of each segment that the calibration looks at.
        calibration_prompts: default of `calibrate.count`.

    Raises:
        ConfigError: the base shares capacity among heads or layers itself, or asks for scores at some segments only.
    """

    floor: int | None = None
    price_decay: float = 0.8
    queries: int = 64
    calibration_prompts: int = 10

    limits = set_limits(
        floor=Limit(1), price_decay=Limit(0, 1), queries=Limit(1), calibration_prompts=Limit(1)
    )

    def __post_init__(self) -> None:
        """Refuse bases whose capacities are not ours to set."""
        super().__post_init__()
        name = type(self.base).__name__
        if not self.base.even:
            raise ConfigError(
                f"method.base: {name} shares capacity among heads or layers itself; choose a base whose heads hold "
                "equally much, as method.base=h2o"
            )
        if self.refresh > 1 or self.ema:
            raise ConfigError(
                "method.base.refresh, method.base.ema: errors are calibrated for scores of every segment; set "
                "method.base.refresh=1 method.base.ema=0"
            )
        if not isinstance(self.base.needs(), Observer | None):
            raise ConfigError(f"method.base: {name} reads a file; choose a base that does not")

    @property
    def heads_independent(self) -> bool:
        """No: heads of all layers share B."""
        return False

    def needs(self) -> ScoreErrors:
        """Return the calibration of the errors, in which is that of the base."""
        return ScoreErrors(self.base, self.queries)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Sell the capacity, and give it to the base's heads."""
        super().prepare(spec, budget, artifact)
        error = require_artifact(artifact, "method=pricekv/by_score:")["error"]
        floor = max(self.floor or choose_floor(spec, budget), find_least(self.base, spec))
        self.capacities = sell_by_curves(error, spec, budget, floor=floor, decay=self.price_decay)
        self.base.assign_capacities(self.capacities)
