"""Result of a race: its table, its files and its notes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.core.files import write_whole
from kvbench.eval.protocol.intervals import bootstrap
from kvbench.extras.race.rules import Found, Race, average, find_interval, measure_lead
from kvbench.report.tables import Row, format_markdown

FILE = "race.json"
TABLE = "race.md"


@dataclass(frozen=True)
class Setting:
    """Facts of a race besides its course.

    Attributes:
        title: model, budget and metric.
        command: the command line.
        metric: name of the metric.
        drawn: number of samples generated for all methods, without the full cache.
        grid: number of samples if all methods generated all prompts.
        refused: reason of each method that did not start.
        slow: seconds per sample of each method that left because of its time.
        calibrated: number of calibration prompts of each method that needs a calibration.
        winner: command line of the winner's run.
    """

    title: str
    command: str
    metric: str
    drawn: int
    grid: int
    refused: Mapping[str, str]
    slow: Mapping[str, float]
    calibrated: Mapping[str, int]
    winner: str


def rank(race: Race, found: Found) -> list[dict[str, object]]:
    """Return a row per method, the best first: mean, prompts, and the leader's lead over it with both intervals.

    Leads and the leader's mean are over the samples that the method generated. A sequence interval is valid at every
    look, for a leader that is chosen in advance; the leader of a race is chosen by the data, so the intervals of the
    table do not hold jointly with the race's error. The fixed-sample interval is the bootstrap for a run whose size is
    chosen in advance; it is not valid after a race.
    """
    leader = race.racing[0]
    sign = 1.0 if race.rules.higher else -1.0
    exits = {left.method: left for left in race.exits}
    rows = []
    for method in (*race.racing, *reversed(exits)):
        ours = average(found, [method])[method]
        row: dict[str, object] = {"method": method, "mean": float(ours.mean()), "prompts": len(ours)}
        if method != leader:
            differences = measure_lead(found, leader, method)
            lead = sign * differences
            fixed = bootstrap(lead.tolist())
            row |= {
                "leader_mean": float((ours + differences).mean()),
                "lead": float(lead.mean()),
                "sequence": None
                if (ends := find_interval(lead, race.pair_error, race.rules.limits)) is None
                else list(ends),
                "fixed_sample": None if fixed is None else [fixed.low, fixed.high],
            }
        if (left := exits.get(method)) is not None:
            row |= {"left_after": left.after, "left_to": left.better, "left_behind": list(left.ahead)}
        rows.append(row)
    return rows


def make_rows(ranking: Sequence[Mapping[str, object]], digits: int) -> list[Row]:
    """Return the ranking as cells of a table; the interval of a lead is shown for methods that are in the race."""
    return [
        {
            "method": str(row["method"]),
            "prompts": str(row["prompts"]),
            "mean": f"{row['mean']:.{digits}f}",
            "leader's mean": f"{row['leader_mean']:.{digits}f}" if "leader_mean" in row else None,
            **_explain(row, digits),
        }
        for row in ranking
    ]


def _explain(row: Mapping[str, Any], digits: int) -> Row:
    """Return the leader's lead over a method, with its interval unless the method left, and why the method left."""
    lead = f"{row['lead']:.{digits}f}" if "lead" in row else None
    reason = None
    if (ends := row.get("left_behind", row.get("sequence"))) is not None:
        low, high = (f"{end:.{digits}f}" for end in ends)
        if "left_to" in row:
            reason = f"after {row['left_after']}, {row['left_to']} ahead by {low} to {high}"
        else:
            lead = f"{lead} [{low}, {high}]"
    return {"leader ahead by": lead, "why it left": reason}


def describe_end(race: Race, setting: Setting) -> list[str]:
    """Return sentences about how the race ended and how many samples it generated."""
    after, left = race.looks[-1].after, ", ".join(race.racing)
    ends = {
        "won": f"{left} alone remains after {after} prompts.",
        "level": f"{left} are within {race.rules.margin:g} of {race.racing[0]} after {after} prompts.",
        "racing": f"{left} remain after all {after} prompts: the race does not tell them apart.",
    }
    calibrations = sum(setting.calibrated.values())
    lines = [
        ends[race.state],
        "Means and leads of a row are over the prompts that its method drew.",
        f"Drawn: {setting.drawn} samples of {setting.grid} of the full grid ({setting.drawn / setting.grid:.0%}), and "
        f"{calibrations} of calibrations. The full cache's samples are not counted.",
    ]
    if race.rarest_shown is not None:
        lines.append(
            f"The first left after {race.exits[0].after} prompts. A method that fails badly in fewer than "
            f"{race.rarest_shown:.0%} of prompts may have shown no failure by then and dropped a better one, which "
            "choose.error does not count; a larger choose.block shows rarer failures."
        )
    lines += [f"{method} left: {seconds:.2f} s per sample." for method, seconds in setting.slow.items()]
    return lines


def write_race(
    folder: Path, race: Race, setting: Setting, ranking: Sequence[Mapping[str, object]], digits: int
) -> None:
    """Write the course and the result of a race as race.json, and its table as race.md."""
    record = {
        "format": 1,
        **asdict(setting),
        "rules": asdict(race.rules),
        "entrants": list(race.entrants),
        "state": race.state,
        "ranking": list(ranking),
        "looks": [asdict(look) for look in race.looks],
        "exits": [asdict(left) for left in race.exits],
    }
    write_whole(folder / FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")
    lines = [setting.title, "", f"    {setting.command}", "", format_markdown(make_rows(ranking, digits))]
    lines += ["", *describe_end(race, setting)]
    lines += [f"Not started: {method} ({reason})." for method, reason in setting.refused.items()]
    write_whole(folder / TABLE, "\n".join(lines) + "\n")
