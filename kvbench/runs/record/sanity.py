"""Checks of results.json beyond the types of its fields: ranges, names of folders, sections that tables read."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from kvbench.core.config import MAX_PROMPTS
from kvbench.runs.record.origins import DIGESTS

SIGNED_COSTS = ("lse_drift",)
"""Costs that may be negative; other negative costs mean damage."""
DIVISORS = ("full_tokens", "full_sequence_bytes", "budget_tokens", "budget_bytes", "batch")
"""Costs by which tables divide, so that 0 is refused."""
MAX_DIGITS = 12
"""Maximum number of decimals of a metric."""
SECTIONS = ("model", "prompts", "method", "eval", "calibrate", "storage", "windows")
"""Sections of the configuration that tables read."""
HASHES = ("weights_sha256", "calibration", *DIGESTS)
"""Strings of the provenance by which runs are grouped."""


def check_results(record: Mapping[str, Any]) -> None:
    """Check that tables and pages can show a run, by the fields of its `Results`.

    Raises:
        ValueError: they cannot show a value; the message names the first one.
    """
    for name in ("run", "reference"):
        if record[name] is not None and not is_folder_name(record[name]):
            raise ValueError(f"{name} is {record[name]!r:.60}, not the name of a folder beside this one")
    if not 1 <= record["n"] <= MAX_PROMPTS:
        raise ValueError(f"n is {record['n']}")
    for name, number in (*vars(record["memory"]).items(), *vars(record["latency"]).items()):
        if name in SIGNED_COSTS or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if number < 0 or (number == 0 and name in DIVISORS):
            raise ValueError(f"{name} is {number}")
    for name, metric in record["metrics"].items():
        for key, most in (("digits", MAX_DIGITS), ("n", MAX_PROMPTS**2)):
            if not 0 <= getattr(metric, key) <= most:
                raise ValueError(f"metrics.{name}.{key} is {getattr(metric, key)}")
    _check_config(record["config"])
    _check_provenance(record["provenance"] or {})


def _check_config(config: Mapping[str, Any]) -> None:
    for name in SECTIONS:
        if not isinstance(section := config.get(name), Mapping | None):
            raise ValueError(f"config.{name} is {section!r:.60}, not an object")
    model = (config.get("model") or {}).get("name") or "?"
    if not is_folder_name(str(model)):
        raise ValueError(f"config.model.name is {model!r:.60}, not the name of a folder")
    for name, section in (("seed", config), ("calibrate.seed", config.get("calibrate") or {})):
        seed = section.get("seed")
        if seed is not None and not (type(seed) is int or (isinstance(seed, str) and seed.isdecimal())):
            raise ValueError(f"config.{name} is {seed!r:.60}, not a whole number")


def _check_provenance(provenance: Mapping[str, object]) -> None:
    resumed = provenance.get("resumed", [])
    if not (isinstance(resumed, list) and all(isinstance(one, Mapping) for one in resumed)):
        raise ValueError("provenance.resumed is not a list of objects")
    for prefix, origin in (("", provenance), *((f"resumed[{i}].", one) for i, one in enumerate(resumed))):
        for name in ("code", "versions", "classes"):
            if not isinstance(origin.get(name) or {}, Mapping):
                raise ValueError(f"provenance.{prefix}{name} is {origin[name]!r:.60}, not an object")
    for name in HASHES:
        if not isinstance(provenance.get(name), str | None):
            raise ValueError(f"provenance.{name} is {provenance[name]!r:.60}, not a string")
    classes = provenance.get("classes") or {}
    assert isinstance(classes, Mapping)
    for part, known in classes.items():
        if not (isinstance(known, Mapping) and all(isinstance(one, Mapping) for one in known.values())):
            raise ValueError(f"provenance.classes.{part} is not an object of objects")


def is_folder_name(name: str) -> bool:
    """Return whether a string names an entry of a folder: without slashes and null characters, not `.` or `..`."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and "\0" not in name
