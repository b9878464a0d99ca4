"""Published datasets for tests, written by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, made_up
from tests.support.run_folders import paint, score, write_run

TEXTS = ("a red ring", "two blue circles", "a cyan cross", "a green star")


def describe_run(method: str, worth: float, seed: int) -> Results:
    """A run of `method` with a PSNR, against a reference of its seed, or that reference itself."""
    is_full, full = method == "full", f"full-1-{seed}"
    config = {
        "model": {"name": "infinity_tiny"},
        "method": {"_target_": "kvbench.methods.x.X"},
        "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": len(TEXTS)},
        "seed": seed,
        "noise": "stream",
    }
    run, reference = (full, None) if is_full else (f"{method}-0.1-{seed}1", full)
    metrics = {} if is_full else {"psnr": score(PSNR, worth, 1.0, protocol="uint8")}
    budget, n = 1.0 if is_full else 0.1, len(TEXTS)
    return made_up(method, budget, metrics, run=run, reference=reference, n=n, config=config)


def publish_runs(out: Path, runs: Mapping[str, Sequence[float]], seeds: Sequence[int] = (0,)) -> Path:
    """Write runs with values per sample, and a reference, for each seed beside `out`, and publish them as `out`."""
    place, folders = out.with_name(f"{out.name}-runs"), []
    for seed in seeds:
        write_run(place, describe_run("full", 0, seed), [(text, {}, paint(200)) for text in TEXTS])
        for method, each in runs.items():
            run = describe_run(method, sum(each) / len(each), seed)
            run = replace(run, metrics={"psnr": replace(run.metrics["psnr"], n=len(each))})
            samples = [(text, {}, paint(90 + number)) for number, text in enumerate(TEXTS)]
            folders.append(write_run(place, run, samples, values={"psnr-uint8": {"psnr": each}}))
    prepare_dataset(read_published(folders), out)
    return out
