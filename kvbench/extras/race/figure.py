"""Figure of a race: the leader's lead over each method by number of prompts."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.extras.race.rules import Found, Interval, Race, find_interval, measure_lead

Point = tuple[float, Interval | None]
"""Mean lead over another method, and its interval."""
LEFT = "#b5503c"  # methods that left the race
RACING = "#2f6f9f"  # methods that are in the race at its end


def draw_race(race: Race, found: Found, stops: Sequence[int], title: str, label: str) -> Figure:
    """Draw intervals of the final leader's lead over each other method.

    Methods that reached the second look have a lane each, with an interval at every look; methods that left at the
    first look have a row each below.

    Args:
        race: the finished race.
        found: values of all samples.
        stops: number of samples of a method at each look.
        title: title of the figure.
        label: name of the metric with its unit.
    """
    leader, sign = race.racing[0], 1.0 if race.rules.higher else -1.0
    looks = [look.after for look in race.looks]
    courses: dict[str, dict[int, Point]] = {}
    for method in (*race.racing[1:], *(left.method for left in reversed(race.exits))):
        courses[method] = {}
        for after, stop in zip(looks, stops, strict=True):
            if stop <= len(found[method]):
                lead = sign * measure_lead(found, leader, method, stop)
                ends = find_interval(lead, race.pair_error, race.rules.limits)
                courses[method][after] = float(lead.mean()), ends
    early = [left.method for left in race.exits if left.after == looks[0]]
    later = [method for method in courses if method not in early]
    heights = [0.8 + 0.45 * len(later) if later else 0.01, 0.8 + 0.18 * len(early) if early else 0.01]
    figure = Figure(figsize=(8.0, sum(heights) + 0.6), layout="constrained")
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
    upper, lower = parts[:, 0]
    if later:
        lanes = upper.subplots(len(later), 1, sharex=True, squeeze=False)[:, 0]
        for axes, method in zip(lanes, later, strict=True):
            _draw_lane(axes, courses[method], RACING if method in race.racing else LEFT)
            axes.set_ylabel(method, rotation=0, ha="right", va="center", fontsize=8)
        lanes[-1].set_xlabel(f"prompts; lead of {leader} in {label}", fontsize=8)
        lanes[-1].set_xlim(0, max(looks) * 1.03)
    if early:
        _draw_rows(lower.subplots(), {method: courses[method][looks[0]] for method in early})
        lower.supxlabel(f"left after {looks[0]} prompts; lead of {leader} in {label}", fontsize=8)
    figure.suptitle(
        f"{title}\nconfidence sequences at {race.rules.error:g} / {len(race.entrants) - 1}", fontsize=10
    )
    return figure


def _draw_lane(axes: Axes, course: Mapping[int, Point], colour: str) -> None:
    """Draw the intervals of the lead over a method by number of prompts."""
    known = {after: ends for after, (_, ends) in course.items() if ends is not None}
    axes.axhline(0, color="0.6", linewidth=0.8)
    for after, ends in known.items():
        axes.vlines(after, *ends, colour, linewidth=2.2)
    axes.plot(list(course), [mean for mean, _ in course.values()], "o", color=colour, markersize=3)
    reach = 1.1 * max(abs(value) for mean, ends in course.values() for value in (mean, *(ends or ())))
    axes.set_ylim(-0.35 * max(reach, 1e-12), max(reach, 1e-12))
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_rows(axes: Axes, points: Mapping[str, Point]) -> None:
    """Draw the interval of the lead over each method, the smallest lead on top."""
    order = sorted(points, key=lambda method: -points[method][0])
    axes.axvline(0, color="0.6", linewidth=0.8)
    for row, method in enumerate(order):
        mean, ends = points[method]
        if ends is not None:
            axes.hlines(row, *ends, LEFT, linewidth=2.2)
        axes.plot(mean, row, "o", color=LEFT, markersize=3)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_ylim(-0.8, len(order) - 0.2)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
