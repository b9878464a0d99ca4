"""Figure of a race: the leader's lead over each method, narrowing over prompts, one lane per method."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.choose.race import Race, Values, find_interval

LEFT = "#b5503c"
RACING = "#2f6f9f"
"""Colours of methods that left and that are in the race at its end."""


def draw_race(race: Race, values: Values, title: str, label: str) -> Figure:
    """Draw the intervals of the final leader's lead over each other method at every look that the method reached.

    Args:
        race: the finished race.
        values: values of each method from the first unit on.
        title: title of the figure.
        label: name of the metric with its unit.
    """
    leader, sign = race.racing[0], 1.0 if race.rules.higher else -1.0
    error = race.rules.error / max(len(race.entrants) - 1, 1)
    others = [*race.racing[1:], *(one.method for one in reversed(race.exits))]
    looks = [look.after for look in race.looks]
    figure = Figure(figsize=(8.0, 1.4 + 0.42 * len(others)), layout="constrained")
    lanes = figure.subplots(max(len(others), 1), 1, sharex=True, squeeze=False)[:, 0]
    for axes, method in zip(lanes, others, strict=False):
        lead = sign * (values[leader][: len(values[method])] - values[method])
        found = {
            after: find_interval(lead[:after], error, race.rules.limits)
            for after in looks
            if after <= len(lead)
        }
        known = {after: ends for after, ends in found.items() if ends is not None}
        colour = RACING if method in race.racing else LEFT
        _draw_lane(axes, {after: float(lead[:after].mean()) for after in found}, known, colour)
        axes.set_ylabel(method, rotation=0, ha="right", va="center", fontsize=8)
    lanes[-1].set_xlabel("prompts")
    lanes[-1].set_xlim(0, max(looks) * 1.03)
    note = f"lead of {leader} in {label}, confidence sequences at {race.rules.error:g} / {len(race.entrants) - 1}"
    figure.suptitle(f"{title}\n{note}", fontsize=10)
    return figure


def _draw_lane(
    axes: Axes, means: Mapping[int, float], ends: Mapping[int, tuple[float, float]], colour: str
) -> None:
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.vlines(
        list(ends),
        [low for low, _ in ends.values()],
        [high for _, high in ends.values()],
        colour,
        linewidth=2.2,
    )
    axes.plot(list(means), list(means.values()), "o", color=colour, markersize=3)
    reach = 1.1 * max(
        (abs(end) for pair in (*ends.values(), tuple(means.values())) for end in pair), default=0.0
    )
    axes.set_ylim(-0.35 * max(reach, 1e-12), max(reach, 1e-12))
    axes.tick_params(labelsize=7)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
