"""Checks of a run's name, configuration, weights, calibration and code against its record."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.core.files import hash_values, parse_json, read_bytes, read_text
from kvbench.core.plain_yaml import parse_yaml
from kvbench.extras.share.verify.verdict import Finding
from kvbench.runs.code import describe_classes, describe_code, read_pins
from kvbench.runs.job import Job
from kvbench.runs.job_identity import identify
from kvbench.runs.prepare import Calibrations
from kvbench.runs.record.code_file import FILE as CODE_FILE
from kvbench.runs.record.code_file import SHOWN, SOURCE, list_changed
from kvbench.runs.record.folder import RunName
from kvbench.runs.record.provenance import find_commit
from kvbench.runs.record.results import Results

IDENTIFYING = (
    "model", "method", "budget_unit", "seed", "storage", "noise", "batch_invariant",
)  # fmt: skip
"""Keys of a configuration that calls of one run have in common; others may be written in several ways."""
LATER = frozenset({"resumed", "taken"})
"""Keys of provenance.json that change after a run's results are written."""


class Recordings(NamedTuple):
    """What a run's folder records of its origin.

    Attributes:
        config: contents of config.yaml; None if it is missing or damaged.
        provenance: contents of provenance.json; empty if it is missing.
        code: contents of code.json; empty if it is missing.
    """

    config: Mapping[str, object] | None
    provenance: Mapping[str, Any]
    code: Mapping[str, Any]


def read_recordings(folder: Path) -> Recordings:
    """Read the files that describe a run's origin; missing and damaged ones are empty."""
    try:
        config = parse_yaml(read_bytes(folder / "config.yaml"))
    except (OSError, ValueError):
        config = None
    provenance, code = (_read_object(folder / name) for name in ("provenance.json", CODE_FILE))
    return Recordings(config if isinstance(config, dict) else None, provenance, code)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        values = parse_json(read_text(path))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def check_weights(job: Job, provenance: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the loaded weights are others than the recorded ones."""
    known, here = provenance.get("weights_sha256"), job.model.weights_sha256
    if known != here:
        yield Finding("weights", f"the record has SHA-256 {_cut(known)}, the weights here {_cut(here)}", True)


def check_calibration(
    calibrations: Calibrations, provenance: Mapping[str, Any], *, same_arithmetic: bool
) -> Iterator[Finding]:
    """Yield a finding if a calibration that was made again in the same arithmetic has another hash."""
    known, here = provenance.get("calibration_sha256"), calibrations.digests["calibration_sha256"]
    if known != here and (same_arithmetic or None in (known, here)):
        yield Finding("calibration", f"the record has SHA-256 {_cut(known)}, made again it has {_cut(here)}")


def check_code(job: Job, recorded: Recordings, folder: Path) -> Iterator[Finding]:
    """Yield a finding for each class whose code here is not the recorded code, and for a contradictory record.

    Other code contradicts the record if it is of the recorded commit, or was read from the run's own copy.
    """
    classes = recorded.provenance.get("classes")
    if not isinstance(classes, Mapping):
        yield Finding("code", "provenance.json does not record it", True)
        return
    commit = find_commit()
    is_same_commit = commit is not None and recorded.provenance.get("code") == commit
    for part, types in job.classes.items():
        is_own = any(_is_copy(one, folder) for one in types)
        known, here = classes.get(part) or {}, describe_classes(types)
        for name in sorted({*known, *here}):
            is_kvbench = is_same_commit and name.startswith("kvbench.")
            if (said := _compare_class(known.get(name), here.get(name), is_kvbench)) is not None:
                yield Finding(f"code of {part}", f"{name} {said}", not (is_kvbench or is_own))
        yield from _check_files(job, part, recorded, is_same_commit, is_own)


def _is_copy(cls: type, folder: Path) -> bool:
    """Return whether a class was imported from the copies of sources in a run's folder."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return path is not None and Path(path).resolve().is_relative_to((folder / SOURCE).resolve())


def _compare_class(known: Any, here: Any, is_same_commit: bool) -> str | None:
    """Return how the recorded code of a class differs from its code here; None if it is the same."""
    if here is None:  # a prepared method contains more classes, which match their pins
        return None if isinstance(known, Mapping) and known.get("pinned") is True else "is not used here"
    if not isinstance(known, Mapping):
        return "is not recorded"
    if known.get("revision") != here["revision"]:
        return f"has revision {known.get('revision')} in the record, {here['revision']} here"
    if known.get("pinned") is True and here["pinned"] and not is_same_commit:
        return None  # a refactoring keeps the revision
    return None if known.get("sha256") == here["sha256"] else "has other code here than in the record"


def _check_files(
    job: Job, part: str, recorded: Recordings, is_same_commit: bool, is_own: bool
) -> Iterator[Finding]:
    """Check that code.json exists, agrees with itself and with the code here."""
    entry, what = recorded.code.get(part), f"code of {part}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("files"), dict):
        yield Finding(what, f"{CODE_FILE} is missing or damaged")
        return
    files, sha256 = entry["files"], entry.get("sha256")
    if hash_values(files) != sha256:
        yield Finding(what, f"files in {CODE_FILE} do not have its SHA-256 {_cut(sha256)}")
    if names := list_changed(files, describe_code(job.classes[part]).files, read_pins().modules):
        is_kvbench = is_same_commit and all(name.startswith("kvbench.") for name in names)
        more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
        text = f"files differ from the code here: {', '.join(names[:SHOWN])}{more}"
        yield Finding(what, text, not (is_kvbench or is_own))


def check_copies(results: Results, recorded: Recordings, name: str) -> Iterator[Finding]:
    """Yield a finding for each file of the folder that contradicts results.json."""
    if results.run != name:
        yield Finding("name", f"the folder is called {name}, results.json is of {results.run}")
    if recorded.config is None:
        yield Finding("config.yaml", "is missing or damaged", True)
    for change in _list_config_changes(results.config, recorded.config or {}):
        yield Finding("config.yaml", change)
    known = results.provenance or {}
    for key in {*known, *recorded.provenance} - LATER:
        if known.get(key) != recorded.provenance.get(key):
            yield Finding("provenance.json", f"{key} is another than in results.json")


def _list_config_changes(ours: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[str]:
    """Yield the identifying keys that two configurations have with different values."""
    first, second = (_flatten({key: one[key] for key in IDENTIFYING if key in one}) for one in (ours, theirs))
    for key in first:
        if key in second and first[key] != second[key] and not key.startswith("model.sources."):
            yield f"{key} is {second[key]!r:.40}, in results.json {first[key]!r:.40}"


def _flatten(values: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(values, Mapping):
        return {prefix: values}
    inner = (_flatten(one, f"{prefix}.{key}" if prefix else str(key)) for key, one in values.items())
    return {key: value for part in inner for key, value in part.items()}


def _cut(sha256: object) -> str:
    """Return the first digits of a hash."""
    return "none" if sha256 is None else str(sha256)[:12]


def check_reference(job: Job, provenance: Mapping[str, Any], name: str | None) -> Iterator[Finding]:
    """Yield a finding if the recorded reference is not the full cache's run of this configuration.

    Weights count as recorded or as they are here.
    """
    if job.is_reference:
        if name is not None:
            yield Finding("reference", f"is {name:.80}; the full cache's run has none")
        return
    ours = identify(job.reference, Calibrations())
    digests = (ours.hash, replace(ours, weights=str(provenance.get("weights_sha256"))).hash)
    if name is None or Path(name).name != name or RunName.of(name).hash not in digests:
        yield Finding(
            "reference", f"is {name!s:.80}, the configuration gives one that ends with {digests[1]}"
        )


def check_name(job: Job, calibrations: Calibrations, recorded: Recordings, name: str) -> Iterator[Finding]:
    """Yield a finding if a folder's name is not the label and the hash of its record.

    Weights and calibration count as recorded; the code here is the recorded code.
    """
    ours, known = identify(job, calibrations), recorded.provenance
    record = replace(ours, weights=str(known.get("weights_sha256")), calibration=known.get("calibration"))
    label, digest = RunName.of(name)
    if label != record.label:
        yield Finding("name", f"the folder is called {label}, its record gives {record.label}")
    if digest == record.hash:
        return
    if digest == ours.hash:  # so the record of weights or calibration is wrong
        for key, right in (("weights_sha256", ours.weights), ("calibration", ours.calibration)):
            if known.get(key) != right:
                yield Finding(
                    key.partition("_")[0],
                    f"the folder's name contains {_cut(right)}, provenance.json does not",
                )
        return
    yield Finding("name", f"the folder's name ends with {digest}, the hash of its record is {record.hash}")
