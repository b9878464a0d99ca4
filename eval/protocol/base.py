"""Base class of evaluators, and the loop that runs them on a set of samples."""

import importlib.util
import json
import logging
import platform
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench.core.extras import find_version, install_command
from kvbench.core.files import write_whole
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSet, SampleSetError, check_same_samples
from kvbench.eval.files.weights import Snapshot, Weight, WeightError
from kvbench.eval.protocol.component import Component
from kvbench.eval.protocol.ranges import find_range
from kvbench.eval.protocol.records import strict
from kvbench.eval.protocol.scores import (
    Metric,
    MetricSpec,
    Score,
    Status,
    cut_interval,
    make_metric,
    with_parts,
)

log = logging.getLogger(__name__)

LIBRARIES = ("kvbench", "torch", "numpy", "scipy", "pillow", "torchvision")


class SkipEvaluation(Exception):
    """The evaluator cannot score these samples."""


@dataclass
class Result:
    """Result of one evaluator.

    Attributes:
        evaluator: name of the evaluator.
        protocol: definition of the metric.
        status: ok, skipped (something is missing) or failed (an error).
        reason: why the evaluator was skipped or failed, or a caveat; None if there is neither.
        metrics: specification of each metric by name.
        scores: scores by metric name; without values unless the status is ok.
        samples: columns aligned with `index`; None for metrics of whole sets. A column named after a metric holds its
            value for each sample, by which two runs are compared.
        needs_reference: whether the evaluator compares with a reference.
        provenance: images, reference, weights, settings, versions, device and time.
    """

    evaluator: str
    protocol: str
    status: Status
    reason: str | None = None
    metrics: Mapping[str, MetricSpec] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=dict)
    samples: dict[str, list[Any]] | None = None
    needs_reference: bool = False
    provenance: dict[str, object] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Return all fields except the samples as strict JSON values; each score is merged with its `MetricSpec`."""
        whole = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("metrics", "samples")}
        whole["scores"] = {
            name: {**asdict(score), **asdict(self.metrics[name])} for name, score in self.scores.items()
        }
        return strict(whole)

    def entries(self) -> dict[str, Metric]:
        """Return the result's entries under `metrics` of results.json, by name of the metric."""
        names = ("status", "reason", "evaluator", "protocol", "needs_reference")
        state = {name: getattr(self, name) for name in names}
        return {name: make_metric(score, self.metrics[name], **state) for name, score in self.scores.items()}

    def save(self, folder: Path) -> Path:
        """Write `<evaluator>-<protocol>.json`, and `.samples.jsonl` if there are samples; return the first path."""
        stem = f"{self.evaluator}-{self.protocol}"
        if self.samples is not None:
            rows = zip(*self.samples.values(), strict=True)
            lines = [
                json.dumps(strict(dict(zip(self.samples, row, strict=True))), allow_nan=False) for row in rows
            ]
            write_whole(folder / f"{stem}.samples.jsonl", "\n".join(lines) + "\n")
        path = folder / f"{stem}.json"
        write_whole(path, json.dumps(self.record(), indent=1, allow_nan=False) + "\n")
        return path


@dataclass(frozen=True)
class Evaluator(Component, ABC):
    """Base class of evaluators: frozen dataclasses whose fields are settings, which the provenance records.

    A subclass implements `run`, sets or overrides the attributes below, and lists the packages that it imports in
    `packages`.

    Attributes:
        name: name of the result.
        needs_reference: whether samples are compared with a reference set, one by one.
        reads: kind of the samples: `images`, `texts`, `readings` or a plugin's.
        spec: specification of the metric `metric`; not needed by a subclass with `metrics` of its own.
        part_names: names of the metric's parts, `<metric>/<part>`.
        required_meta: metadata key that every prompt needs; None if no key is needed.
        revision: increased when the same settings give different scores, so that old scores are not reused.
        meta_keys: metadata keys that scores depend on; None counts all metadata, so that no change is missed.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 0
    needs_reference: ClassVar[bool] = False
    reads: ClassVar[str] = ImageSet.kind
    spec: ClassVar[MetricSpec]
    part_names: ClassVar[tuple[str, ...]] = ()
    required_meta: ClassVar[str | None] = None
    meta_keys: ClassVar[tuple[str, ...] | None] = None

    @property
    @abstractmethod
    def protocol(self) -> str:
        """Name of the metric's definition."""

    @property
    def metric(self) -> str:
        """Name of the metric, by default `<name>[<protocol>]`."""
        return f"{self.name}[{self.protocol}]"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Specifications of all metrics that `run` may return, by name: by default the metric and its parts."""
        return with_parts(self.metric, self.spec, self.part_names)

    def adapt(self, samples: Any) -> "Evaluator":
        """Return the evaluator for these samples, with other metric names if the samples require them."""
        return self

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the reference files, or folders of files, that scores depend on, by name.

        A missing file is None, or a path that does not exist. `run` is the folder of the scored run.
        """
        return {}

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check one prompt's metadata before generation; not called if no prompt has `required_meta`.

        Raises:
            ValueError: the key is missing or its value is malformed.
        """
        if self.required_meta is not None and meta.get(self.required_meta) is None:
            raise ValueError(f"no {self.required_meta}, which other prompts have; add it")

    @abstractmethod
    def run(self, samples: Any, reference: Any, device: str) -> Result:
        """Score samples of the kind `reads`; a SkipEvaluation skips the evaluator, any other exception fails it."""


def evaluate(
    evaluators: Sequence[Evaluator],
    samples: SampleSet,
    reference: SampleSet | None = None,
    device: str = "cpu",
    *,
    same_seeds: bool = True,
) -> list[Result]:
    """Run evaluators one after another; an evaluator that is skipped or fails does not stop the others.

    Args:
        evaluators: evaluators to run.
        samples: samples to score.
        reference: the same samples of the reference run.
        device: torch device.
        same_seeds: require equal seeds of samples and reference.

    Raises:
        SampleSetError: samples and reference do not match.
    """
    if reference is not None:
        names = f"{samples.folder} and its reference {reference.folder}"
        attributes = ("seed", "prompt", "size") if same_seeds else ("prompt", "size")
        check_same_samples(names, samples.samples, reference.samples, attributes)
    return [_evaluate(evaluator, samples, reference, device) for evaluator in evaluators]


def list_missing_packages(evaluator: Evaluator) -> list[str]:
    """Return the packages that an evaluator imports and that are not installed."""
    return [name for name in evaluator.packages if importlib.util.find_spec(name) is None]


def find_missing(evaluator: Evaluator) -> list[str]:
    """Return the missing packages and files of an evaluator, each with a remedy."""
    packages = [
        f"package missing: {name}. Get it with: {install_command(name)}"
        for name in list_missing_packages(evaluator)
    ]
    return packages + [weight.remedy() for weight in evaluator.weights if weight.find() is None]


def read_meta(samples: SampleSet, key: str, what: str, where: str) -> list[Any]:
    """Return the metadata value of each sample under a key.

    Args:
        samples: samples to read.
        key: key of the value.
        what: noun for the value, for errors.
        where: prompts that have the value, for errors.

    Raises:
        SkipEvaluation: no sample has the key.
        ValueError: some samples do not have it.
    """
    values = {index: samples.meta(index).get(key) for index in samples.indices}
    missing = [index for index, value in values.items() if value is None]
    if len(missing) == len(values):
        raise SkipEvaluation(f"the prompts have no {what}s {where}")
    if missing:
        raise ValueError(f"sample {missing[0]} has no {what}, which other samples have; add it")
    return list(values.values())


def make_result(
    evaluator: Evaluator,
    scores: Mapping[str, Score],
    samples: Mapping[str, Sequence[object]] | None = None,
    weights: Mapping[str, str | dict[str, str]] | None = None,
    caveat: str | None = None,
) -> Result:
    """Return a finished result; intervals are cut at the ranges of their metrics.

    Args:
        evaluator: the evaluator of the scores.
        scores: scores by metric name.
        samples: columns aligned with `index`, see `Result.samples`.
        weights: SHA-256 of the files used, by name.
        caveat: remark for readers of the scores.

    Raises:
        ValueError: a name is not in `evaluator.metrics`.
    """
    if unknown := [name for name in scores if name not in evaluator.metrics]:
        raise ValueError(f"{evaluator.name}: `metrics` does not have {unknown[0]}")
    cut = {name: cut_interval(score, find_range(name)) for name, score in scores.items()}
    result = _result(evaluator, "ok", caveat, cut)
    result.samples = None if samples is None else {name: list(column) for name, column in samples.items()}
    result.provenance["weights"] = dict(weights or {})
    return result


def _evaluate(evaluator: Evaluator, samples: SampleSet, reference: SampleSet | None, device: str) -> Result:
    start = time.perf_counter()
    evaluator = evaluator.adapt(samples)
    reference = reference if evaluator.needs_reference else None
    try:
        if obstacles := _find_obstacles(evaluator, samples, reference):
            raise SkipEvaluation("; ".join(obstacles))
        result = evaluator.run(samples, reference, device)
    except SkipEvaluation as skip:
        result = _result(evaluator, "skipped", str(skip))
        log.debug("%s skipped: %s", evaluator.name, skip)
    except (WeightError, SampleSetError) as error:  # a file is at fault, not the code
        result = _result(evaluator, "failed", str(error))
        log.error("%s failed: %s", evaluator.name, error)  # noqa: TRY400
    except Exception as error:  # keep the results of the other evaluators
        result = _result(evaluator, "failed", f"{type(error).__name__}: {error}")
        result.provenance["traceback"] = traceback.format_exc()
        log.exception("%s failed", evaluator.name)
    result.provenance |= _provenance(evaluator, samples, reference, device)
    result.provenance["seconds"] = round(time.perf_counter() - start, 3)
    return result


def _find_obstacles(evaluator: Evaluator, samples: SampleSet, reference: SampleSet | None) -> list[str]:
    """Return the reasons why an evaluator cannot score these samples."""
    if evaluator.reads != samples.kind:
        return [f"it scores {evaluator.reads}, and these are {samples.kind}"]
    no_reference = evaluator.needs_reference and reference is None
    message = ["it compares with a reference run, and none was given"] if no_reference else []
    return find_missing(evaluator) + message


def _result(
    evaluator: Evaluator, status: Status, reason: str | None, scores: Mapping[str, Score] | None = None
) -> Result:
    """Return a result; without `scores` all metrics have no value."""
    values = {name: Score(None) for name in evaluator.metrics} if scores is None else dict(scores)
    names, needs = (evaluator.name, evaluator.protocol), evaluator.needs_reference
    return Result(*names, status, reason, evaluator.metrics, values, needs_reference=needs)


def _provenance(
    evaluator: Evaluator, samples: SampleSet, reference: SampleSet | None, device: str
) -> dict[str, object]:
    versions = {name: find_version(name) for name in (*LIBRARIES, *evaluator.packages)}
    installed = {name: version for name, version in versions.items() if version is not None}
    return {
        "images": _identity(samples),
        "reference": None if reference is None else _identity(reference),
        "settings": {f.name: _setting(getattr(evaluator, f.name)) for f in fields(evaluator)},
        "versions": {"python": platform.python_version(), **installed},
        "device": device,
        "threads": torch.get_num_threads(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _identity(samples: SampleSet) -> dict[str, object]:
    return {"digest": samples.digest, "n": len(samples), "run": samples.folder.resolve().name}


def _setting(value: object) -> object:
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Weight | Snapshot):
        return value.file
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "is": type(value).__qualname__,
            **{f.name: _setting(getattr(value, f.name)) for f in fields(value)},
        }
    qualified = getattr(value, "__qualname__", None)
    return repr(value) if qualified is None else f"{value.__module__}.{qualified}"
