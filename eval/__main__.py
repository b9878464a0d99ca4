"""Command that scores folders of images from any program: python -m kvbench.eval psnr,ssim FOLDER REFERENCE."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.files import find_obstacle
from kvbench.eval.registry import Settings, build_metrics, change_settings, describe_metrics, read_metrics

if TYPE_CHECKING:
    from kvbench.eval.protocol.base import Result


def main(arguments: list[str] | None = None) -> int:
    """Print all scores with intervals, or why they are missing; return 1 if a metric failed or the input is bad."""
    options = _parser().parse_args(arguments)
    metrics: dict[str, Settings] = {}
    try:
        for name in options.metrics.split(","):
            metrics |= read_metrics(name)
        for change in options.set:
            change_settings(metrics, change)
        if options.out is not None and (obstacle := find_obstacle(options.out)):
            raise ValueError(f"--out {options.out} is not a folder that can be written to: {obstacle}")
        results = _score(metrics, options)
        for result in results:
            _show(result)
            if options.out is not None:
                print(f"written: {result.save(options.out)}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(any(result.status == "failed" for result in results))


def _parser() -> argparse.ArgumentParser:
    known = describe_metrics()
    width = max(map(len, known), default=0)
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.eval",
        description=__doc__,
        epilog="\n".join(["metrics:", *(f"  {name:<{width}}  {text}" for name, text in known.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("metrics", help="one or more of those below, with commas")
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
        "--prompts", type=Path, help="texts of the images in natural order of their names (.txt, .jsonl)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    return parser


def _score(metrics: dict[str, Settings], options: argparse.Namespace) -> "list[Result]":
    import torch  # takes seconds; not needed for --help and errors

    from kvbench.eval.files.image_folder import open_pair
    from kvbench.eval.protocol.base import evaluate

    evaluators, device = build_metrics(metrics), str(torch.device(options.device))
    images, reference = open_pair(options.folder, options.reference, options.prompts)
    return evaluate(evaluators, images, reference, device)


def _show(result: "Result") -> None:
    for name, metric in result.entries().items():
        if metric.value is None:
            continue
        interval = ""
        if metric.interval is not None:
            low, high = metric.interval
            interval = f"   95 % interval {low:.{metric.digits}f} .. {high:.{metric.digits}f}"
        print(
            f"{name} {metric.value:.{metric.digits}f} {metric.unit}".rstrip() + f"   n {metric.n}{interval}"
        )
    if result.reason:
        print(f"{result.evaluator} {result.status}: {result.reason}")


if __name__ == "__main__":
    sys.exit(main())
