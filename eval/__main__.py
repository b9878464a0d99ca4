"""Command that scores folders of images from any program: python -m kvbench.eval psnr,ssim,lpips FOLDER REFERENCE."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.files import find_obstacle
from kvbench.eval.registry import Settings, build_metrics, change_settings, describe_metrics, read_metrics

if TYPE_CHECKING:
    from kvbench.eval.protocol.base import Result
    from kvbench.eval.protocol.scores import Metric


def main(arguments: list[str] | None = None) -> int:
    """Print a table of scores with intervals, and why some are missing.

    Returns:
        0 if a metric has a value and none failed, else 1.
    """
    options = _parser().parse_args(arguments)
    metrics: dict[str, Settings] = {}
    try:
        for name in options.metrics.split(","):
            metrics |= read_metrics(name)
        for change in options.set:
            change_settings(metrics, change)
        if options.out is not None and (obstacle := find_obstacle(options.out)):
            raise ValueError(f"--out {options.out} cannot be written to ({obstacle}); name another folder")
        results = _score(metrics, options)
        _show(results)
        if options.out is not None:
            for result in results:
                print(f"written: {result.save(options.out)}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    states = {result.status for result in results}
    return int("failed" in states or "ok" not in states)


def _parser() -> argparse.ArgumentParser:
    known = describe_metrics()
    width = max(map(len, known), default=0)
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.eval",
        description=__doc__,
        epilog="\n".join(["metrics:", *(f"  {name:<{width}}  {text}" for name, text in known.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("metrics", help="one or more metrics of the list below, separated by commas")
    parser.add_argument("folder", type=Path, help="images, or a run folder")
    parser.add_argument("reference", type=Path, nargs="?", help="references of paired metrics, by file name")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of conf/eval, such as batch=4 or kid.subsets=50",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="prompts of the images in the natural order of their names (.txt, .jsonl)",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    return parser


def _score(metrics: dict[str, Settings], options: argparse.Namespace) -> "list[Result]":
    from kvbench.core.devices import check_device  # torch takes seconds; not needed for --help and errors
    from kvbench.eval.files.image_folder import open_pair
    from kvbench.eval.protocol.base import evaluate

    evaluators, device = build_metrics(metrics), options.device
    check_device(device)
    images, reference = open_pair(options.folder, options.reference, options.prompts)
    return evaluate(evaluators, images, reference, device)


def _show(results: "list[Result]") -> None:
    rows = [
        _describe(name, metric)
        for result in results
        for name, metric in result.entries().items()
        if metric.value is not None
    ]
    table = [("metric", "value", "95 % interval", "n"), *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for result in results:
        if result.reason:
            print(f"{result.evaluator} {result.status}: {result.reason}")


def _describe(name: str, metric: "Metric") -> tuple[str, str, str, str]:
    """Return the row of a metric: its name, value with unit, interval and number of samples."""
    digits, interval = metric.digits, ""
    if metric.interval is not None:
        low, high = metric.interval
        interval = f"{low:.{digits}f} .. {high:.{digits}f}"
    arrow = "" if metric.detail else " ↑" if metric.better == "higher" else " ↓"
    return name + arrow, f"{metric.value:.{digits}f} {metric.unit}".rstrip(), interval, str(metric.n)


if __name__ == "__main__":
    sys.exit(main())
