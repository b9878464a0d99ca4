"""`task=choose`: a race among methods on one model and budget."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.config.compose import list_words
from kvbench.cli.console import CONSOLE, say
from kvbench.core.config import ConfigError
from kvbench.core.files import hash_values
from kvbench.core.settings import Settings
from kvbench.extras.race.entrants import (
    Runner,
    find_entrants,
    find_evaluator,
    has_random_order,
    keep_overrides,
)
from kvbench.extras.race.figure import draw_race
from kvbench.extras.race.result import Setting, describe_end, make_rows, rank, write_race
from kvbench.extras.race.rules import Found, Race, Rules, advance, average, split_blocks
from kvbench.extras.race.values import find_limits, has_higher_values, name_values
from kvbench.methods.shared.calibration import Observer
from kvbench.report.figures.styles import save
from kvbench.report.tables import print_line, print_rows
from kvbench.runs.job import Job


def choose(cfg: Mapping[str, Any], settings: Settings) -> Path:
    """Run `task=choose`: generate in blocks, drop methods that are behind, rank them; return the result's folder.

    Raises:
        ConfigError: the metric cannot be raced, or fewer than two methods fit.
    """
    assert settings.metric is not None
    given = list_words()
    name, spec = find_evaluator(cfg, settings.metric)
    overrides = keep_overrides(given, name)
    if settings.shuffle is None and not has_random_order(cfg["prompts"]):
        overrides = (*overrides, "shuffle=0")
        say("neighbouring prompts may be alike: the race draws them in random order (shuffle=0)")
    runner = Runner(overrides, name, settings.metric, spec)
    entrants, refused = find_entrants(runner, settings.methods)
    say(f"{len(entrants)} methods start" + (f", {len(refused)} do not fit" if refused else ""))
    prompts = [prompt.text for prompt in entrants[0].prompts]
    blocks = split_blocks(prompts, settings.choose.block, settings.batch_size)
    race, found, slow = _hold(runner, settings, {job.method_name: job for job in entrants}, blocks)
    stops = [block.stop for block in blocks[: len(race.looks)]]
    setting = Setting(
        title=f"{cfg['model']['name']}, budget {settings.budget}, {settings.metric}",
        command=shlex.join(("python", "run.py", *given)),
        metric=settings.metric,
        drawn=sum(map(len, found.values())),
        grid=len(prompts) * len(entrants),
        refused=refused,
        slow=slow,
        calibrated={
            job.method_name: len(job.calibration_prompts)
            for job in entrants
            if isinstance(job.method.needs(), Observer)
        },
        winner=shlex.join(("python", "run.py", *runner.overrides, f"method={race.racing[0]}")),
    )
    rules = [settings.metric, settings.margin, vars(settings.choose), list(found)]
    folder = settings.runs_dir / "races" / hash_values([runner.overrides, *rules])[:10]
    folder.mkdir(parents=True, exist_ok=True)
    ranking = rank(race, found)
    write_race(folder, race, setting, ranking, spec.digits)
    figure = draw_race(race, found, stops, setting.title, name_values(settings.metric, spec))
    save(figure, folder / "race.png")
    print_rows(CONSOLE, setting.title, make_rows(ranking, spec.digits), 1)
    for line in describe_end(race, setting):
        print_line(CONSOLE, line, "")
    say(f"the leader: {setting.winner}\nrace: {folder}")
    return folder


def _hold(
    runner: Runner, settings: Settings, entrants: Mapping[str, Job], blocks: Sequence[range]
) -> tuple[Race, Found, dict[str, float]]:
    """Run the race; return it, the values of each method, and the seconds per sample of methods that were too slow.

    Raises:
        ConfigError: fewer than two methods are fast enough.
    """
    limit = settings.choose.seconds
    found: Found = {method: [] for method in entrants}
    took = _draw_block(runner, entrants.values(), blocks[0], found)
    slow = {method: seconds for method, seconds in took.items() if limit is not None and seconds > limit}
    if len(fast := [method for method in entrants if method not in slow]) < 2:
        raise ConfigError(f"choose.seconds={limit}: {len(fast)} of {len(entrants)} methods fit; raise it")
    limits = find_limits(runner.metric, (value for values in found.values() for _, value in values))
    higher = has_higher_values(runner.metric, runner.spec)
    rules = Rules(higher, settings.choose.error, float(settings.margin), limits)
    race = advance(Race.start(fast, rules), average(found, fast))
    _say_look(race)
    for block in blocks[1:]:
        if race.state != "racing":
            break
        _draw_block(runner, [entrants[method] for method in race.racing], block, found)
        race = advance(race, average(found, race.racing))
        _say_look(race)
    runner.close()
    return race, found, slow


def _draw_block(runner: Runner, jobs: Iterable[Job], block: range, found: Found) -> dict[str, float]:
    """Generate a block of each method, add its values to `found`, and return the seconds per sample by method."""
    seconds = {}
    for job in jobs:
        values, seconds[job.method_name] = runner.draw(job, block)
        found[job.method_name] += values
    return seconds


def _say_look(race: Race) -> None:
    look = race.looks[-1]
    left = [f"{out.method} (behind {out.better})" for out in race.exits if out.after == look.after]
    out = f"; out: {', '.join(left)}" if left else ""
    print_line(CONSOLE, f"after {look.after} prompts: {len(race.racing)} go on, {look.leader} leads{out}", "")
