"""Scoring of a complete run: missing metrics, and the contact sheet."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import write_whole
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.texts import open_samples
from kvbench.eval.protocol.base import Evaluator, Result, evaluate, find_missing
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.record.results import Evaluated, Results
from kvbench.runs.score.contact_sheet import draw_contact_sheet


def find_pending(
    evaluators: Mapping[str, Evaluator], settings: Mapping[str, object], known: Results | None
) -> dict[str, Evaluator]:
    """Return evaluators whose result is not there, was made with other settings, failed, or lacked what is there now.

    Args:
        evaluators: by config name.
        settings: their settings by the same names, JSON values.
        known: results of an earlier call, None if there are none.
    """
    entries = {} if known is None else known.evaluated
    return {
        name: one
        for name, one in evaluators.items()
        if not _is_current(one, settings.get(name), entries.get(name))
    }


def _is_current(evaluator: Evaluator, settings: object, entry: Evaluated | None) -> bool:
    if entry is None or entry.settings != settings or entry.status == "failed":
        return False
    return not entry.lacking or bool(find_missing(evaluator))


def check_required(evaluators: Mapping[str, Evaluator], required: Sequence[str]) -> None:
    """Make sure that evaluators have what they need.

    Raises:
        ConfigError: a required one is not in `eval`, or lacks packages or files.
    """
    for name in required:
        if name not in evaluators:
            raise ConfigError(
                f"require={name}: it is not in eval, which has {', '.join(evaluators) or 'nothing'}"
            )
        if lacking := find_missing(evaluators[name]):
            raise ConfigError(f"require={name}: {'; '.join(lacking)}")


def check_scored(evaluators: Mapping[str, Evaluator], required: Sequence[str], results: Results) -> None:
    """Make sure that required evaluators were neither skipped nor failed.

    Raises:
        ConfigError: one was; its metrics' reasons say why.
    """
    for name in required:
        if (status := results.evaluated[name].status) != "ok":
            metrics = [
                results.metrics[metric] for metric in evaluators[name].metrics if metric in results.metrics
            ]
            reasons = {metric.reason or "no reason given" for metric in metrics}
            raise ConfigError(f"require={name}: {status} ({'; '.join(sorted(reasons))})")


def score(
    folder: Path,
    reference: Path | None,
    evaluators: Mapping[str, Evaluator],
    settings: Mapping[str, object],
    device: str,
    *,
    same_seeds: bool = True,
) -> tuple[dict[str, Evaluated], dict[str, Metric]]:
    """Run evaluators on a complete run and write what they found under metrics/; also draw the contact sheet.

    Args:
        folder: the run.
        reference: the run it is compared with.
        evaluators: by config name.
        settings: their settings by the same names, JSON values.
        device: torch device.
        same_seeds: refuse a reference whose samples had other seeds.

    Returns:
        `evaluated`, by config name, and `metrics`, by metric name, of results.json.
    """
    samples = open_samples(folder)
    other = None if reference is None else open_samples(reference)
    results = evaluate(list(evaluators.values()), samples, other, device, same_seeds=same_seeds)
    evaluated: dict[str, Evaluated] = {}
    metrics: dict[str, Metric] = {}
    for (name, evaluator), result in zip(evaluators.items(), results, strict=True):
        result.save(folder / "metrics")
        metrics |= result.entries()
        lacking = tuple(find_missing(evaluator)) if result.status == "skipped" else ()
        evaluated[name] = Evaluated(settings.get(name), result.status, result.protocol, lacking)
    psnr = _psnr_by_index(results)
    if psnr and isinstance(samples, ImageSet) and isinstance(other, ImageSet):
        run = folder.name.rpartition("-")[0]
        sheet = draw_contact_sheet(samples, other, psnr, run.replace("-", ", budget ", 1), run.split("-")[0])
        write_whole(folder / "contact_sheet.png", sheet)
    return evaluated, metrics


def _psnr_by_index(results: Sequence[Result]) -> dict[int, float]:
    for result in results:
        if result.evaluator == "psnr" and result.samples is not None:
            return dict(zip(result.samples["index"], result.samples["psnr"], strict=True))
    return {}
