"""Entrants of a race: the methods that fit, the evaluator of its metric, and runs generated block by block."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

from kvbench.cli.config.compose import compose_job, compose_metrics, read_settings
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.messages import describe_error
from kvbench.cli.config.search_path import leaving_out, list_choices
from kvbench.cli.config.words import is_choice
from kvbench.cli.tasks.job import make_job
from kvbench.core.bars import make_bar
from kvbench.core.config import ConfigError, import_target
from kvbench.core.suggestions import suggest
from kvbench.eval.protocol.base import Evaluator, find_missing
from kvbench.eval.protocol.scores import MetricSpec
from kvbench.extras.race.values import score_block
from kvbench.runs.check import check_job
from kvbench.runs.execute import OpenRun
from kvbench.runs.execute import run as execute
from kvbench.runs.job import Job
from kvbench.runs.partial import begin, extend, leave

OWN_KEYS = ("task", "metric", "methods", "margin", "choose", "eval", "against", "verbose")
"""Keys of the command that are not passed to its runs."""
OF_SETS = ".eval.distribution."
"""Part of the module path of metrics of whole sets."""
ODD = ("full", "kvpress")
"""Methods that start only if they are named: the reference itself, and presses of the library kvpress."""


@dataclass(frozen=True)
class Runner:
    """Runs of a race, generated as far as the race needs them.

    Attributes:
        overrides: overrides of the command that every run gets.
        evaluator: name in conf/eval of the evaluator of the metric.
        metric: name of the metric.
        spec: specification of the metric.
        begun: runs that are begun and their references, by method; a method is prepared once for all blocks.
    """

    overrides: tuple[str, ...]
    evaluator: str
    metric: str
    spec: MetricSpec
    begun: dict[str, tuple[OpenRun, OpenRun]] = field(default_factory=dict)

    def make(self, method: str) -> Job:
        """Compose the run of a method and make its objects."""
        cfg = compose_job([*self.overrides, f"method={method}", f"eval=[{self.evaluator}]"])[0]
        return make_job(cfg, read_settings(cfg), keep_model=True)

    def draw(self, job: Job, block: range) -> tuple[list[tuple[str, float]], float]:
        """Generate a block of a method's run and of its reference; return its values with prompts, and s per sample.

        The run is the same as that of `task=run`. Samples that exist are not generated again, and blocks that other
        processes generate are waited for. With the last block the run is finished.
        """
        name = job.method_name
        if name not in self.begun:
            check_job(job)
            self.begun[name] = begin(job), begin(job.reference)
        run, reference = self.begun[name]
        extend(reference, block)
        extend(run, block, reference.folder.path)
        if block.stop == len(job.prompts):
            execute(self.make(name))  # `execute` needs an unprepared method
        folders = run.folder.path, reference.folder.path
        evaluator = job.evaluators[self.evaluator]
        values = score_block(evaluator, self.metric, folders, block, job.metadata, job.settings.device)
        records = run.folder.recorded()
        return values, fmean(float(str(records[index]["seconds"])) for index in block)

    def close(self) -> None:
        """Record in the status of unfinished runs that the race needs no more samples of them."""
        for run in chain.from_iterable(self.begun.values()):
            leave(run)


def keep_overrides(overrides: Sequence[str], evaluator: str) -> tuple[str, ...]:
    """Return the overrides of the command that its runs get, including settings of their evaluator."""
    keys = [override.lstrip("+~").split("=")[0] for override in overrides]
    return tuple(
        override
        for override, key in zip(overrides, keys, strict=True)
        if key.startswith(f"eval.{evaluator}.") or key.split(".")[0] not in OWN_KEYS
    )


def find_evaluator(cfg: Mapping[str, Any], metric: str) -> tuple[str, MetricSpec]:
    """Return the name in conf/eval of the evaluator of a metric, and the metric's specification.

    Evaluators of the command are searched first, then those of the file that is named like the metric, then all others.

    Raises:
        ConfigError: no evaluator has the metric, it lacks weights or packages, or the metric is of a whole set.
    """
    given, known = dict(cfg.get("eval") or {}), dict[str, None]()
    for name, node in _list_nodes(given, re.split(r"[/\[]", metric)[0]):  # without network and part
        with nullcontext() if name in given else leaving_out(f"eval.{name}"):
            evaluator: Evaluator = instantiate(node)
            known |= dict.fromkeys(evaluator.metrics)
        if metric in known:
            break
    else:
        raise ConfigError(f"metric={metric}: no such metric{suggest(metric, known, 'eval')}")
    if OF_SETS in type(evaluator).__module__:
        raise ConfigError(
            f"metric={metric}: describes a whole set of images, not single prompts; use psnr or lpips"
        )
    if lacking := find_missing(evaluator):
        raise ConfigError(f"metric={metric}: {'; '.join(lacking)}")
    return name, evaluator.metrics[metric]


def _list_nodes(given: Mapping[str, Any], stem: str) -> Iterator[tuple[str, Any]]:
    """Yield names and nodes of the command's evaluators, of those of the file named like the metric, then of others."""
    yield from given.items()
    if is_choice("eval", stem):
        yield from (compose_job([f"eval=[{stem}]"])[0].eval or {}).items()
    yield from ((name, node) for name, node in compose_metrics().items() if name not in given)


def find_entrants(runner: Runner, named: Sequence[str] | None) -> tuple[list[Job], dict[str, str]]:
    """Return the jobs of methods that fit, and the reason for every other method.

    Raises:
        ConfigError: fewer than two methods fit, or a method of `named` does not.
    """
    names = named or [name for name in list_choices("method") if name not in ODD]
    entrants: list[Job] = []
    refused: dict[str, str] = {}
    for name in make_bar(iterable=names, desc="checks", unit="method"):
        try:
            with _quiet():
                job = runner.make(name)
                check_job(job)
                if not job.method.budgeted and job.settings.budget != 1:
                    raise ConfigError("has no budget, so its memory would not be comparable")
        except Exception as error:  # a class of the user may raise anything
            refused[name] = _describe(error)
            if named:
                raise ConfigError(f"methods: {name} does not fit: {refused[name]}") from None
        else:
            entrants.append(job)
    if len(entrants) < 2:
        reasons = [f"; {times} do not: {why}" for why, times in Counter(refused.values()).most_common(1)]
        raise ConfigError(
            f"task=choose: {len(entrants)} methods fit this model and budget, and a race needs two{''.join(reasons)}"
        )
    _check_calibration(entrants[0])
    return entrants, refused


def _describe(error: Exception) -> str:
    """Return one line about any error, with the error's type if it is not a user's."""
    try:
        return describe_error(error)
    except Exception as cause:
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def has_random_order(prompts: Mapping[str, Any]) -> bool:
    """Return whether a configuration's prompts come in random order, so that neighbours are not more alike."""
    drawn = getattr(import_target(prompts["_target_"], "prompts"), "in_random_order", False)
    return bool(drawn) or ("of" in prompts and has_random_order(prompts["of"]))


def _check_calibration(job: Job) -> None:
    """Raise a ConfigError if prompts of a calibration file are in the race too, on which calibrated methods lead."""
    file, raced = job.settings.calibrate.prompts, {prompt.text for prompt in job.prompts}
    if file is not None and (both := sum(prompt.text in raced for prompt in job.calibration_prompts)):
        raise ConfigError(
            f"calibrate.prompts={file}: {both} of its prompts are in the race too; leave them out of the file"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of checks, which finished runs repeat."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
