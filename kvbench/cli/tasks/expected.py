"""Expected time of a job: from finished runs in this folder, else scaled from a figure of docs/performance.md."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import hydra
import torch

from kvbench.cli.config.instantiate import instantiate
from kvbench.core.cards import CARDS, Card
from kvbench.engine.memory import token_bytes
from kvbench.engine.work import HALF, list_steps
from kvbench.methods.shared.calibration import Observer
from kvbench.models.base import Model
from kvbench.plan import find_floors, hold_everything
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results


class Figure(NamedTuple):
    """Seconds per image of a model under the full cache at batch 8, from docs/performance.md."""

    model: str
    seconds: float
    machine: str
    card: Card | None = None


FIGURES = {
    ("next-scale", "cuda"): Figure("infinity_2b", 0.625, "an H200", CARDS["h200"]),
    ("next-token", "cuda"): Figure("llamagen_xl", 576 / 1379, "an H200", CARDS["h200"]),
    ("next-scale", "cpu"): Figure("infinity_tiny", 33.14e-3, "two CPU cores"),
    ("next-token", "cpu"): Figure("llamagen_tiny", 1.404 / 8, "two CPU cores"),
}
"""Measured times by family of models and kind of device."""


class Expected(NamedTuple):
    """Seconds per sample and their source; `scaled` if measured with a different model or machine."""

    seconds: float
    source: str
    scaled: bool


def expect_time(job: Job, known: Sequence[Results]) -> Expected:
    """Return the expected time of a sample: the median of finished runs, else the scaled figure of a different model.

    On a GPU it is scaled by the floors of `task=plan`, on the GPU of this process if `CARDS` has it; on a CPU by
    parameters times tokens.

    Args:
        job: the job.
        known: finished runs of its model on its device, only runs of its method if there are any.
    """
    if known:
        times = [run.latency.seconds_per_image for run in known]
        return Expected(median(times), f"{len(times)} finished runs", scaled=False)
    figure = FIGURES[job.model.spec.family, job.settings.device.partition(":")[0]]
    source = f"{figure.model} on {figure.machine} (docs/performance.md)"
    card = figure.card and (_find_card(job.settings.device) or figure.card)
    if figure.model == job.model.name and card is figure.card:
        return Expected(figure.seconds, source, scaled=False)
    reference = instantiate(hydra.compose("config", overrides=[f"model={figure.model}"]).model)
    if card is None or figure.card is None:
        share, rule = _count_work(job.model) / _count_work(reference), "parameters times tokens"
    else:
        share = _find_floor(job.model, card) / _find_floor(reference, figure.card)
        rule = f"the floors of task=plan on {card.name}"
    return Expected(figure.seconds * share, f"{source}, by {rule}", scaled=True)


def count_samples(job: Job) -> int:
    """Return the samples that a job generates without its reference: prompts, calibration, timed batches."""
    calibration = len(job.calibration_prompts) if isinstance(job.method.needs(), Observer) else 0
    if job.settings.task != "profile":
        return len(job.prompts) + calibration
    chosen = job.settings.profile
    caches = 1 if job.is_reference or not chosen.against_full else 2
    return calibration + sum(chosen.batch_sizes) * caches * (chosen.warmup + chosen.repeats + 2)


def format_time(seconds: float) -> str:
    """Format a time in its largest unit.

    >>> format_time(5400)
    '1.5 h'
    """
    size, unit = next(one for one in ((3600, "h"), (60, "min"), (0, "s")) if seconds >= one[0])
    return f"{seconds / max(size, 1):.1f} {unit}"


def _find_card(device: str) -> Card | None:
    """Return the `Card` of a device; None for an unknown GPU or without a GPU."""
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    return next((card for card in CARDS.values() if card.driver == name), None)


def _find_floor(model: Model, card: Card) -> float:
    """Return the minimum seconds of a batch of 8 under the full cache in 16 bits on a GPU."""
    spec = model.spec
    held = hold_everything(spec, token_bytes(spec, HALF))
    floors = find_floors(spec, list_steps(spec), held, 8, model.least_work, card)
    return sum(floor.seconds for floor in floors.values())


def _count_work(model: Model) -> int:
    return model.parameters * sum(model.spec.lengths) * model.spec.branches
