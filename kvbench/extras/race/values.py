"""Values of a metric for a block of samples of a run that may be unfinished."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.eval.files.kinds import open_samples
from kvbench.eval.protocol.base import Evaluator, evaluate
from kvbench.eval.protocol.ranges import Range, find_range
from kvbench.eval.protocol.scores import MetricSpec

IDENTICAL = 100.0
"""PSNR in dB that replaces infinity for an image that equals its reference."""
MEAN_ERRORS = {"psnr_mean_mse": "mse"}
"""Column of the errors of metrics that are a function of the mean error over samples, by metric."""


def name_values(metric: str, spec: MetricSpec) -> str:
    """Return the name of the values of `score_block`, with their unit."""
    if metric in MEAN_ERRORS:
        return f"{MEAN_ERRORS[metric]} of {metric}"
    return f"{metric} ({spec.unit})" if spec.unit else metric


def has_higher_values(metric: str, spec: MetricSpec) -> bool:
    """Return whether larger values of `score_block` are better."""
    return metric not in MEAN_ERRORS and spec.better == "higher"


def find_limits(metric: str, values: Iterable[float]) -> Range | None:
    """Return the bounds of a metric whose values are answers (0 or 1); None for other values."""
    limits = find_range(metric)
    bounded = limits is not None and all(map(math.isfinite, limits))
    return limits if bounded and all(value in (0.0, 1.0) for value in values) else None


def score_block(
    evaluator: Evaluator,
    metric: str,
    folders: tuple[Path, Path],
    block: Sequence[int],
    metadata: Sequence[dict[str, object]],
    device: str,
) -> list[tuple[str, float]]:
    """Return prompt and value of each sample of a block, for `psnr_mean_mse` the mean squared error.

    Args:
        evaluator: evaluator of the metric.
        metric: name of the metric.
        folders: the run and its reference, which have the samples of the block.
        block: indices of the samples.
        metadata: metadata of all prompts.
        device: torch device.

    Raises:
        ConfigError: the evaluator was skipped or failed, or a sample has no finite value of the metric.
        SampleSetError: a file is missing or damaged.
    """
    samples, reference = (open_samples(folder, block).with_metadata(metadata) for folder in folders)
    [result] = evaluate([evaluator], samples, reference, device)
    column = MEAN_ERRORS.get(metric, metric)
    if result.status != "ok":
        raise ConfigError(f"metric={metric}: {result.status} ({result.reason})")
    if result.samples is None or column not in result.samples:
        raise ConfigError(
            f"metric={metric}: has no value for each sample, which a race needs; use a metric of single samples, such "
            "as psnr, lpips, kl or exact_answer"
        )
    values = dict(zip(result.samples["index"], result.samples[column], strict=True))
    if metric == "psnr":
        values = {index: min(value, IDENTICAL) for index, value in values.items()}
    for index in block:
        if (value := values.get(index)) is None or not math.isfinite(value):
            where = f"sample {index} of {folders[0].name}"
            raise ConfigError(f"metric={metric}: {where} has {value}, and a race needs a number")
    return [(samples.samples[index].cluster, float(values[index])) for index in block]
