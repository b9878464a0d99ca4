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
from kvbench.extras.race.entrants import Runner, find_entrants, find_evaluator, has_random_order, keep_words
from kvbench.extras.race.figure import draw_race
from kvbench.extras.race.result import Setting, describe_end, make_rows, rank, write_race
from kvbench.extras.race.rules import Found, Race, Rules, advance, average, split_blocks
from kvbench.extras.race.values import find_limits, has_higher_values, name_values
from kvbench.methods.shared.calibration import Observer
from kvbench.report.figures.styles import save
from kvbench.report.tables import print_line, print_rows
from kvbench.runs.job import Job


def choose(cfg: Mapping[str, Any], settings: Settings) -> Path:
    """Do `task=choose`: draw in blocks, drop methods that are behind, and rank them; return the folder of the result.

    Raises:
        ConfigError: the metric cannot be raced, or fewer than two methods fit.
    """
    assert settings.metric is not None
    given = list_words()
    name, spec = find_evaluator(cfg, settings.metric)
    words = keep_words(given, name)
    if settings.shuffle is None and not has_random_order(cfg["prompts"]):
        words = (*words, "shuffle=0")
        say("neighbouring prompts may be alike: the race draws them in random order (shuffle=0)")
    runner = Runner(words, name, settings.metric, spec)
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
        winner=shlex.join(("python", "run.py", *runner.words, f"method={race.racing[0]}")),
    )
    rules = [settings.metric, settings.margin, vars(settings.choose), list(found)]
    place = settings.runs_dir / "races" / hash_values([runner.words, *rules])[:10]
    place.mkdir(parents=True, exist_ok=True)
    ranking = rank(race, found)
    write_race(place, race, setting, ranking, spec.digits)
    figure = draw_race(race, found, stops, setting.title, name_values(settings.metric, spec))
    save(figure, place / "race.png")
    print_rows(CONSOLE, setting.title, make_rows(ranking, spec.digits), 1)
    for line in describe_end(race, setting):
        print_line(CONSOLE, line, "")
    say(f"the leader: {setting.winner}\nrace: {place}")
    return place


def _hold(
    runner: Runner, settings: Settings, entrants: Mapping[str, Job], blocks: Sequence[range]
) -> tuple[Race, Found, dict[str, float]]:
    """Hold the race; return it with the values of each method, and methods that were too slow with their seconds."""
    limit = settings.choose.seconds
    found: Found = {method: [] for method in entrants}
    took = _draw_block(runner, entrants.values(), blocks[0], found)
    slow = {method: seconds for method, seconds in took.items() if limit is not None and seconds > limit}
    if len(fast := [method for method in entrants if method not in slow]) < 2:
        raise ConfigError(f"choose.seconds={limit}: {len(fast)} of {len(entrants)} methods are that fast")
    race = advance(Race.start(fast, _read_rules(settings, runner, found)), average(found, fast))
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
    """Draw a block of each method, note its values, and return the seconds per sample."""
    seconds = {}
    for job in jobs:
        values, seconds[job.method_name] = runner.draw(job, block)
        found[job.method_name] += values
    return seconds


def _read_rules(settings: Settings, runner: Runner, found: Found) -> Rules:
    """Return the rules of the race; answers have limits."""
    limits = find_limits(runner.metric, (value for values in found.values() for _, value in values))
    higher = has_higher_values(runner.metric, runner.spec)
    return Rules(higher, settings.choose.error, float(settings.margin), limits)


def _say_look(race: Race) -> None:
    look = race.looks[-1]
    left = [f"{one.method} (behind {one.better})" for one in race.exits if one.after == look.after]
    out = f"; out: {', '.join(left)}" if left else ""
    print_line(CONSOLE, f"after {look.after} prompts: {len(race.racing)} go on, {look.leader} leads{out}", "")
