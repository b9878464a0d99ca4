"""Races among methods, which anytime-valid paired intervals decide.

All methods get the same prompts with the same noise, so paired differences vary little. After each block of prompts a
method leaves if the confidence sequence of its difference to another method shows that the other is better. The error
of each pair is `error / (methods - 1)`: the best method is only dropped if one of its own pairs errs, so the error of
the whole race is bounded by `error`, whenever it stops. Prompts must come in random order.

Intervals of values other than answers are asymptotic. They do not hold for methods that fail rarely and badly: before
its first failure such a method looks better than it is (`Race.rarest_shown`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal

import numpy as np

from kvbench.core.config import ConfigError
from kvbench.core.settings import MIN_UNITS
from kvbench.eval.protocol.ranges import Range
from kvbench.eval.protocol.sequences import Floats, bounded_sequence, normal_sequence

Interval = tuple[float, float]
Values = Mapping[str, Floats]
"""Values float64 [units] of each method, in the order of generation; all methods have the same units."""

Found = dict[str, list[tuple[str, float]]]
"""Prompt and value of each sample of each method, in the order of generation."""


@dataclass(frozen=True)
class Rules:
    """Rules of a race.

    Attributes:
        higher: whether larger values are better.
        error: bound on the probability that the best method is dropped, unless worse methods fail rarely and badly.
        margin: maximum difference of two methods that count as level, in the metric's unit.
        limits: smallest and largest value of a metric whose values are answers (0 or 1); None for other metrics.
    """

    higher: bool = True
    error: float = 0.05
    margin: float = 0.0
    limits: Range | None = None


@dataclass(frozen=True)
class Elimination:
    """A method that left the race.

    Attributes:
        method: name of the method.
        after: number of units (`average`) after which it left.
        better: name of a method whose lead over it has an interval above zero.
        ahead: interval of that lead.
    """

    method: str
    after: int
    better: str
    ahead: Interval


@dataclass(frozen=True)
class InterimResult:
    """Means and intervals of a race after a block of prompts.

    Attributes:
        after: number of units (`average`) so far.
        means: mean of each method in the race.
        leads: interval of the leader's lead over each other method in the race; None if all differences are equal.
    """

    after: int
    means: Mapping[str, float]
    leads: Mapping[str, Interval | None]

    @property
    def leader(self) -> str:
        """The leading method, with which the intervals compare all other methods."""
        return next(iter(self.means))


@dataclass(frozen=True)
class Race:
    """A race after some looks.

    Attributes:
        rules: rules of the race.
        entrants: methods that started.
        racing: methods in the race, the best mean first.
        looks: result after each block.
        exits: methods that left, in the order of leaving.
        state: `won` if one method remains, `level` if all remaining methods are within the margin, else `racing`.
    """

    rules: Rules
    entrants: tuple[str, ...]
    racing: tuple[str, ...]
    looks: tuple[InterimResult, ...] = ()
    exits: tuple[Elimination, ...] = ()
    state: Literal["racing", "won", "level"] = field(default="racing")

    @property
    def pair_error(self) -> float:
        """Error probability of the interval of one pair."""
        return self.rules.error / max(len(self.entrants) - 1, 1)

    @property
    def rarest_shown(self) -> float | None:
        """Smallest failure rate over prompts that shows before the first exit with probability 1 - `pair_error`.

        None if no method left, or for answers, whose intervals assume no distribution.
        """
        if not self.exits or self.rules.limits is not None:
            return None
        return 1 - self.pair_error ** (1 / self.exits[0].after)

    @classmethod
    def start(cls, methods: Sequence[str], rules: Rules) -> "Race":
        """Return a race of two or more methods before its first look."""
        return cls(rules, tuple(methods), tuple(methods))


def advance(race: Race, values: Values) -> Race:
    """Return the race after a look at all values so far.

    Args:
        race: the race before.
        values: values of the methods in the race from the first unit on.
    """
    rules, sign = race.rules, 1.0 if race.rules.higher else -1.0
    means = {method: float(values[method].mean()) for method in race.racing}
    order = sorted(race.racing, key=lambda method: -sign * means[method])
    ordered = sign * np.stack([values[method] for method in order])
    after = ordered.shape[1]
    first, second = np.triu_indices(len(order), 1)
    ahead = find_intervals(ordered[first] - ordered[second], race.pair_error, rules.limits)
    exits: dict[str, Elimination] = {}
    for better, other, lead in zip(first, second, ahead, strict=True):
        if lead is not None and lead[0] > 0:
            exits.setdefault(order[other], Elimination(order[other], after, order[better], lead))
    racing = tuple(method for method in order if method not in exits)
    of_leader = {other: lead for other, lead in zip(order[1:], ahead, strict=False) if other not in exits}
    look = InterimResult(after, {method: means[method] for method in racing}, of_leader)
    level = all(lead is not None and max(-lead[0], lead[1]) <= rules.margin for lead in of_leader.values())
    state: Literal["racing", "won", "level"] = "won" if not of_leader else "level" if level else "racing"
    left = tuple(exits[method] for method in reversed(order) if method in exits)
    return replace(race, racing=racing, looks=(*race.looks, look), exits=(*race.exits, *left), state=state)


def find_intervals(differences: Floats, error: float, limits: Range | None) -> list[Interval | None]:
    """Return the interval of each mean of differences `[means, units]`: bounded for answers, else asymptotic.

    An asymptotic interval of equal differences is None: it would have no width, although a rare different value may not
    have occurred yet.
    """
    if limits is not None:
        width = limits[1] - limits[0]
        ends = zip(*bounded_sequence(differences, error, -width, width), strict=True)
        return [(float(low), float(high)) for low, high in ends]
    known, ends = np.ptp(differences, -1) > 0, zip(*normal_sequence(differences, error), strict=True)
    return [
        (float(low), float(high)) if vary else None for vary, (low, high) in zip(known, ends, strict=True)
    ]


def find_interval(differences: Floats, error: float, limits: Range | None) -> Interval | None:
    """Return the interval of the mean of differences `[units]`, see `find_intervals`."""
    return find_intervals(differences[None], error, limits)[0]


def split_blocks(prompts: Sequence[str], block: int, batch: int) -> list[range]:
    """Return the blocks of a race, in samples: whole batches of at least `block` whole prompts, except the last.

    Args:
        prompts: prompt of each sample; neighbours may have one prompt.
        block: minimum number of prompts between two looks.
        batch: number of samples that a run generates together.

    Raises:
        ConfigError: the first block has fewer than `MIN_UNITS` prompts.
    """
    starts = [index for index, prompt in enumerate(prompts) if index == 0 or prompt != prompts[index - 1]]
    blocks, counts, first, count = [], [], 0, 0
    for end in [*starts[1:], len(prompts)]:
        count += 1
        if end == len(prompts) or (count >= block and end % batch == 0):
            blocks.append(range(first, end))
            counts.append(count)
            first, count = end, 0
    if counts[0] < MIN_UNITS:
        raise ConfigError(
            f"choose.block={block}: the first block has {counts[0]} prompts, and a race needs {MIN_UNITS} "
            "before its first look; raise choose.block or prompts.count"
        )
    return blocks


def average(found: Found, methods: Sequence[str]) -> dict[str, Floats]:
    """Return the means of neighbouring samples of one prompt by method, float64 [units] in the order of generation.

    Such samples are alike, and the sequences need independent units. A prompt that comes again later is another unit:
    a unit must not change after a look.
    """
    averages = {}
    for method in methods:
        groups = groupby(found[method], key=itemgetter(0))
        averages[method] = np.array(
            [np.mean([value for _, value in group]) for _, group in groups], np.float64
        )
    return averages


def measure_lead(found: Found, leader: str, method: str, count: int | None = None) -> Floats:
    """Return the leader's values minus another method's, float64 [units], over samples that both have.

    Later samples of a prompt that only the leader has do not count.

    Args:
        found: values of all samples.
        leader: the method with the most samples.
        method: the other method.
        count: number of samples, from the first on; None for all of `method`.
    """
    stop = len(found[method]) if count is None else count
    values = average({name: found[name][:stop] for name in (leader, method)}, (leader, method))
    return values[leader] - values[method]
