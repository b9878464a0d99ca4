"""Memory, times and metrics of several runs that differ in seeds, as one run's.

Means of metrics are computed from the values of all samples, and cached beside the runs.
"""

from collections.abc import Hashable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import fmean

from kvbench.core.files import hash_files
from kvbench.core.kept import FileCache
from kvbench.eval.protocol import compare, crossed, intervals, ranges, scores
from kvbench.eval.protocol.compare import RECORDS
from kvbench.eval.protocol.crossed import Crossed, cross_runs
from kvbench.eval.protocol.records import read_fields
from kvbench.runs.record.results import Latency, Memory

KEPT = ".seeds.kept"
"""Name of the cache file under `runs_dir`."""
MAKERS = (compare, crossed, intervals, ranges, scores)
"""Modules whose code decides the cached means."""
LOWEST = ("last_tokens", "last_bytes", "least_share", "budget_tokens")
"""Fields of `Memory` of which the minimum over runs is reported."""
TIMES = ("seconds_per_image", "seconds_per_image_median", "images_per_second", "tokens_per_second")
"""Fields of `Latency` that are averaged."""
AVERAGED = ("lse_drift", "utilisation", "bytes_read")
"""Fields of `Memory` of which the mean is reported; of fields in neither tuple the maximum."""


def combine_memory(every: Sequence[Memory]) -> Memory:
    """Return the bounds over several runs: maximum peaks, minimum contents, and means of `AVERAGED`."""
    bounds: dict[str, object] = {}
    for field in fields(Memory):
        known = [value for memory in every if isinstance(value := getattr(memory, field.name), int | float)]
        if known:
            choose = min if field.name in LOWEST else fmean if field.name in AVERAGED else max
            bounds[field.name] = choose(known)
    return replace(every[0], **bounds)  # type: ignore[arg-type]


def average_latency(every: Sequence[Latency]) -> Latency:
    """Return the mean times of the runs that ran under the most common condition; samples of the others are counted."""
    conditions = [(latency.batch, latency.device, latency.machine, latency.busy) for latency in every]
    chosen = max(conditions, key=lambda latency: (conditions.count(latency), latency[0]))
    total = sum(latency.samples + latency.others for latency in every)
    every = [latency for latency, condition in zip(every, conditions, strict=True) if condition == chosen]
    samples = sum(latency.samples for latency in every)
    means: dict[str, object] = {}
    for name in TIMES:
        known = [value for latency in every if isinstance(value := getattr(latency, name), int | float)]
        if known:
            means[name] = fmean(known)
    return replace(every[0], **means, samples=samples, others=total - samples)  # type: ignore[arg-type]


class SeedMeans:
    """Means over runs below a folder, kept in one file of it; `save` writes them."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        version = hash_files(Path(str(module.__file__)) for module in MAKERS)
        self._kept = FileCache(runs_dir / KEPT, version)

    def cross(self, folders: Sequence[Path], choices: Sequence[Sequence[Hashable]]) -> dict[str, Crossed]:
        """Return the result of `cross_runs`, from the cache file if no record of the runs changed since.

        Raises:
            Exception: as `cross_runs`, whose failures are not cached.
        """
        names = [folder.relative_to(self._runs_dir).as_posix() for folder in folders]
        files = [folder / RECORDS for folder in folders]
        files += [path for folder in folders for path in sorted((folder / "metrics").glob("*.json*"))]
        name = " ".join(f"{name} {choice}" for name, choice in zip(names, choices, strict=True))

        def cross() -> dict[str, object]:
            return {metric: asdict(one) for metric, one in cross_runs(folders, choices=choices).items()}

        values = self._kept.get(name, files, cross)
        return {metric: read_fields(Crossed, value) for metric, value in values.items()}

    def save(self) -> None:
        """Write the cache file: the results that were used, and all others of runs that still exist."""
        self._kept.save(lambda name: (self._runs_dir / name.partition(" ")[0]).is_dir())
