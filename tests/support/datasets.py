"""Published datasets for tests: written by hand, or only in memory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.core.files import hash_values
from kvbench.leaderboard.datasets import Dataset, Entry, Found
from kvbench.leaderboard.document import make_leaderboard
from kvbench.report.dataset import prepare_dataset, read_published
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, made_up
from tests.support.run_folders import paint, score, write_run

TEXTS = ("a red ring", "two blue circles", "a cyan cross", "a green star")


def describe_run(
    method: str, worth: float, *, budget: float = 0.1, seed: int = 0, sinks: int = 1, **more: object
) -> Results:
    """A run of `method` with a PSNR, against a reference of its seed; `more` are fields of `Results`."""
    config = {
        "model": {"name": "infinity_tiny"},
        "method": {"sinks": sinks, "_target_": "kvbench.methods.x.X"},
        "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": len(TEXTS)},
        "protect": {"sinks": sinks},
        "sinks": sinks,
        "seed": seed,
        "noise": "stream",
    }
    provenance = {
        "versions": {"kvbench": "0.1.0"},
        "code": {"commit": "c0ffee00c0ffee", "diff_sha256": ""},
        "machine": "an EPYC",
        "weights_sha256": "feed",
    }
    metrics = {} if method == "full" else {"psnr": score(PSNR, worth, 1.0, protocol="uint8")}
    known = {
        "run": f"{method}-{budget:g}-{seed}{sinks}",
        "reference": None if method == "full" else f"full-1-{seed}",
        "n": len(TEXTS),
        "config": config,
        "provenance": provenance,
        "finished": "2026-05-04T03:02:01+00:00",
    }
    return made_up(method, budget, metrics, **{**known, **more})


def describe_reference(seed: int = 0) -> Results:
    """The full cache's run of a seed."""
    return describe_run("full", 0, budget=1.0, seed=seed, run=f"full-1-{seed}")


def make_dataset(
    name: str, entries: Iterable[tuple[Results, object, object]], author: str | None = None
) -> Dataset:
    """A dataset in memory: of each run its results, its prompts and its samples."""
    made = {}
    for run, texts, samples in entries:
        path = f"{run.model}/{run.run}"
        made[path] = Entry(path, run, hash_values(texts), hash_values([texts, samples]), {})
    return Dataset(Path(name), author, hash_values([name, sorted(made)]), made)


def read_leaderboard(found: Found, output: Path | None = None) -> Any:
    """The leaderboard of datasets as a page gets it, read back from JSON."""
    return json.loads(json.dumps(make_leaderboard(found, output)))


def publish_runs(
    out: Path, runs: Mapping[str, Sequence[float]], author: str | None = None, brightness: int = 200
) -> Path:
    """Write runs with values per sample, and a reference of some brightness, and publish them as `out`."""
    place = out.with_name(f"{out.name}-runs")
    write_run(place, describe_reference(), [(text, {}, paint(brightness)) for text in TEXTS])
    folders = []
    for method, each in runs.items():
        run = describe_run(method, sum(each) / len(each))
        metric = replace(run.metrics["psnr"], n=len(each))
        run = replace(run, metrics={"psnr": metric})
        samples = [(text, {}, paint(90 + number)) for number, text in enumerate(TEXTS)]
        folders.append(write_run(place, run, samples, values={"psnr-uint8": {"psnr": each}}))
    prepare_dataset(read_published(folders), out, author=author)
    return out
