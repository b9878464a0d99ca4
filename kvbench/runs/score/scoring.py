"""Scoring of a complete run: missing metrics, and the contact sheet."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.extras import install_command
from kvbench.core.files import write_whole
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.kinds import open_samples
from kvbench.eval.files.weights import find_wrong
from kvbench.eval.protocol.base import Evaluator, evaluate, find_missing, list_missing_packages
from kvbench.eval.protocol.inputs import Inputs, find_changes
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.record.results import Evaluated, Results
from kvbench.runs.score.contact_sheet import draw_contact_sheet

log = logging.getLogger(__name__)


def find_pending(
    evaluators: Mapping[str, Evaluator],
    settings: Mapping[str, object],
    inputs: Mapping[str, Inputs],
    known: Results | None,
) -> dict[str, Evaluator]:
    """Return evaluators whose results are missing, failed, have other settings or inputs, or lacked what exists now.

    Evaluators, their settings (JSON values) and inputs are by config name.
    """

    def is_current(name: str) -> bool:
        entry = None if known is None else known.evaluated.get(name)
        if entry is None or entry.settings != settings.get(name) or entry.status == "failed":
            return False
        if entry.lacking:
            return bool(find_missing(evaluators[name]))
        return not find_changes(entry.inputs, inputs[name])

    return {name: one for name, one in evaluators.items() if not is_current(name)}


def check_evaluators(evaluators: Mapping[str, Evaluator], required: Sequence[str]) -> None:
    """Check, before any work, that required evaluators have what they need; log which other evaluators lack a package.

    Raises:
        ConfigError: a required evaluator is not in `eval`, or lacks packages or files.
    """
    for name in required:
        if name not in evaluators:
            raise ConfigError(f"require={name}: not in eval, which has {', '.join(evaluators) or 'nothing'}")
        if lacking := find_missing(evaluators[name]):
            raise ConfigError(f"require={name}: {'; '.join(lacking)}")
    commands: dict[str, list[str]] = {}
    for name, evaluator in evaluators.items():
        for command in dict.fromkeys(map(install_command, list_missing_packages(evaluator))):
            commands.setdefault(command, []).append(name)
    for command, names in commands.items():
        log.warning("eval=%s: skipped, packages are missing; get them with: %s", ",".join(names), command)


def check_weights(evaluators: Mapping[str, Evaluator]) -> None:
    """Check the files of evaluators whose hashes are known; missing files are left to `find_missing`.

    Raises:
        ConfigError: the SHA-256 of a file is not the known one.
    """
    for name, evaluator in evaluators.items():
        if wrong := find_wrong(evaluator.weights):
            raise ConfigError(f"eval={name}: {'; '.join(wrong)}")


def score(
    folder: Path,
    reference: Path | None,
    evaluators: Mapping[str, Evaluator],
    settings: Mapping[str, object],
    inputs: Mapping[str, Inputs],
    metadata: Sequence[dict[str, object]],
    device: str,
    *,
    same_seeds: bool = True,
) -> tuple[dict[str, Evaluated], dict[str, Metric]]:
    """Run evaluators on a complete run; write metrics/ and the contact sheet.

    Args:
        folder: the run.
        reference: the run to compare with.
        evaluators: evaluators by config name.
        settings: settings of evaluators by config name, JSON values.
        inputs: digests of the evaluators' inputs, by config name.
        metadata: metadata of the prompts, which scores are computed with.
        device: torch device.
        same_seeds: refuse a reference whose samples have other seeds.

    Returns:
        `evaluated`, by config name, and `metrics`, by metric name, of results.json.
    """
    samples = open_samples(folder).with_metadata(metadata)
    other = None if reference is None else open_samples(reference).with_metadata(metadata)
    results = evaluate(list(evaluators.values()), samples, other, device, same_seeds=same_seeds)
    evaluated: dict[str, Evaluated] = {}
    metrics: dict[str, Metric] = {}
    for (name, evaluator), result in zip(evaluators.items(), results, strict=True):
        result.save(folder / "metrics")
        metrics |= result.entries()
        missing = tuple(find_missing(evaluator)) if result.status == "skipped" else ()
        read = {key: digest for key, digest in inputs[name].items() if digest is not None}
        evaluated[name] = Evaluated(settings.get(name), result.status, result.protocol, missing, read)
    tables = (one.samples for one in results if one.evaluator == "psnr" and one.samples is not None)
    psnr = next((dict(zip(table["index"], table["psnr"], strict=True)) for table in tables), {})
    if psnr and isinstance(samples, ImageSet) and isinstance(other, ImageSet):
        run = folder.name.rpartition("-")[0]
        sheet = draw_contact_sheet(samples, other, psnr, run.replace("-", ", budget ", 1), run.split("-")[0])
        write_whole(folder / "contact_sheet.png", sheet)
    return evaluated, metrics
