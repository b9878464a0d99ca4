"""Checks of results.json beyond the types of its fields: ranges, names of folders, sections that tables read."""

from collections.abc import Mapping
from typing import Protocol

from kvbench.core.config import MAX_PROMPTS
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.record.digests import DIGESTS
from kvbench.runs.record.names import is_folder_name

SIGNED_COSTS = ("lse_drift",)
"""Costs that may be negative; other negative costs mean damage."""
DIVISORS = ("full_tokens", "full_sequence_bytes", "budget_tokens", "budget_bytes", "batch")
"""Costs by which tables divide."""
MAX_DIGITS = 12
"""Most decimals of a metric."""
SECTIONS = ("model", "prompts", "method", "eval", "calibrate", "storage", "windows")
"""Sections of a configuration that tables read."""
SEEDS = ("seed", "calibrate.seed")
HASHES = ("weights_sha256", "calibration", *DIGESTS)
"""Texts of the provenance by which runs are grouped."""


class _Record(Protocol):
    """What is checked of `kvbench.runs.record.results.Results`."""

    @property
    def run(self) -> str: ...
    @property
    def reference(self) -> str | None: ...
    @property
    def n(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def provenance(self) -> Mapping[str, object] | None: ...
    @property
    def memory(self) -> object: ...
    @property
    def latency(self) -> object: ...
    @property
    def metrics(self) -> Mapping[str, Metric]: ...
    def setting(self, path: str) -> object: ...


def check_results(results: _Record) -> None:
    """Check that tables and pages can show a run.

    Raises:
        ValueError: names the first value that they cannot.
    """
    for name in ("run", "reference"):
        value = getattr(results, name)
        if value is not None and not is_folder_name(value):
            raise ValueError(f"{name} is {value!r:.60}, not the name of a folder beside this one")
    if not 1 <= results.n <= MAX_PROMPTS:
        raise ValueError(f"n is {results.n}")
    _check_costs(results)
    for name, metric in results.metrics.items():
        if not 0 <= metric.digits <= MAX_DIGITS:
            raise ValueError(f"metrics.{name}.digits is {metric.digits}")
        if not 0 <= metric.n <= MAX_PROMPTS**2:
            raise ValueError(f"metrics.{name}.n is {metric.n}")
    _check_config(results)
    _check_provenance(results.provenance or {})


def _check_costs(results: _Record) -> None:
    for name, number in (*vars(results.memory).items(), *vars(results.latency).items()):
        if name in SIGNED_COSTS or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if number < 0 or (number == 0 and name in DIVISORS):
            raise ValueError(f"{name} is {number}")


def _check_config(results: _Record) -> None:
    for name in SECTIONS:
        section = results.config.get(name)
        if section is not None and not isinstance(section, Mapping):
            raise ValueError(f"config.{name} is {section!r:.60}, not an object")
    if not is_folder_name(results.model):
        raise ValueError(f"config.model.name is {results.model!r:.60}, not the name of a folder")
    for name in SEEDS:
        seed = results.setting(name)
        if seed is not None and not (type(seed) is int or (isinstance(seed, str) and seed.isdecimal())):
            raise ValueError(f"config.{name} is {seed!r:.60}, not a whole number")


def _check_provenance(provenance: Mapping[str, object]) -> None:
    resumed = provenance.get("resumed", [])
    if not (isinstance(resumed, list) and all(isinstance(one, Mapping) for one in resumed)):
        raise ValueError("provenance.resumed is not a list of objects")
    for origin in (provenance, *resumed):
        for name in ("code", "versions", "classes"):
            if not isinstance(origin.get(name) or {}, Mapping):
                raise ValueError(f"provenance.{name} is {origin[name]!r:.60}, not an object")
    for name in HASHES:
        if not isinstance(provenance.get(name), str | None):
            raise ValueError(f"provenance.{name} is {provenance[name]!r:.60}, not a text")
    classes = provenance.get("classes") or {}
    assert isinstance(classes, Mapping)
    for part, known in classes.items():
        if not (isinstance(known, Mapping) and all(isinstance(one, Mapping) for one in known.values())):
            raise ValueError(f"provenance.classes.{part} is not an object of objects")
