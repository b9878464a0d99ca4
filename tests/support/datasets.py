"""Published datasets for tests, written by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from tests.support.results import PSNR, made_up
from tests.support.run_folders import paint, score, write_run

TEXTS = ("a red ring", "two blue circles", "a cyan cross", "a green star")


def publish_runs(out: Path, runs: Mapping[str, Sequence[float]], seeds: Sequence[int] = (0,)) -> Path:
    """Write runs with a PSNR per sample, and a reference, for each seed beside `out`, and publish them as `out`."""
    place, folders = out.with_name(f"{out.name}-runs"), []
    for seed in seeds:
        config = {
            "model": {"name": "infinity_tiny"},
            "method": {"_target_": "kvbench.methods.x.X"},
            "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": len(TEXTS)},
            "seed": seed,
            "noise": "stream",
        }
        shared, full = {"n": len(TEXTS), "config": config}, f"full-1-{seed}"
        reference = made_up("full", 1.0, {}, run=full, **shared)
        write_run(place, reference, [(text, {}, paint(200)) for text in TEXTS])
        samples = [(text, {}, paint(90 + number)) for number, text in enumerate(TEXTS)]
        for method, each in runs.items():
            psnr = score(PSNR, sum(each) / len(each), 1.0, protocol="uint8", n=len(each))
            name = f"{method}-0.1-{seed}1"
            run = made_up(method, 0.1, {"psnr": psnr}, run=name, reference=full, **shared)
            folders.append(write_run(place, run, samples, values={"psnr-uint8": {"psnr": each}}))
    prepare_dataset(read_published(folders), out)
    return out
