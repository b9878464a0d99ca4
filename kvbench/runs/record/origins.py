"""provenance.json of a run: the commits, versions and machines that its samples were made with, and digests.

The file describes the first process that worked on the run; `resumed` lists the others that differ.

A run's name has what a calibration was made from, so that it is the same on every machine; the values in the file
differ by rounding. So all samples of a run are made by one calibration and one engine, whose digests are in the file.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbench.core.files import parse_json, read_text

FILE = "provenance.json"
ORIGIN_KEYS = ("code", "versions", "gpu", "cpu", "machine", "threads", "processors")
"""Keys by which two origins are distinguished."""
KEYS = (*ORIGIN_KEYS, "device", "load", "started")
"""Keys of an entry of `resumed`."""
DIGESTS = {
    "calibration_sha256": "calibration",
    "codebooks_sha256": "codebooks",
    "engine_sha256": "engine, kernels or core",
}
"""Keys of digests, and what each is the SHA-256 of."""
SHOWN_DIGITS = 8

Origin = Mapping[str, object]


def read_provenance(folder: Path) -> Origin | None:
    """Return the contents of a run's provenance.json; None if it is missing or damaged."""
    try:
        values = parse_json(read_text(folder / FILE))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def read_digests(folder: Path) -> Mapping[str, object]:
    """Return the digests in a run's provenance.json; none if it is missing or damaged."""
    values = read_provenance(folder)
    return {} if values is None else {name: values.get(name) for name in DIGESTS}


def describe_difference(known: Mapping[str, object], ours: Mapping[str, object]) -> str:
    """Return the digests in which two records differ, as `another calibration (1a2b3c4d, not 5e6f7a8b)`, else "".

    A side without a record differs in nothing.
    """
    names = [name for name in DIGESTS if known and ours and known.get(name) != ours.get(name)]
    return ", ".join(
        f"another {DIGESTS[name]} ({_cut(known.get(name))}, not {_cut(ours.get(name))})" for name in names
    )


def _cut(sha256: object) -> str:
    return "none" if sha256 is None else str(sha256)[:SHOWN_DIGITS]


def list_origins(provenance: Origin | None) -> list[Origin]:
    """Return the origins in the contents of provenance.json, beginning with the first process's."""
    if not provenance:
        return []
    resumed = provenance.get("resumed")
    others = resumed if isinstance(resumed, list) else []
    return [provenance, *(one for one in others if isinstance(one, Mapping))]


def read_origins(folder: Path) -> list[Origin]:
    """Return the origins of the run in a folder; none if they are not recorded or the file is damaged."""
    return list_origins(read_provenance(folder))


def with_origins(provenance: Origin, origins: Iterable[Origin]) -> Origin:
    """Return the contents of provenance.json with further origins, each of them once."""
    known = [_identify(one) for one in list_origins(provenance)]
    added: list[Origin] = []
    for origin in origins:
        if _identify(origin) not in known:
            known.append(_identify(origin))
            added.append({key: origin[key] for key in KEYS if key in origin})
    return {**provenance, "resumed": [*list_origins(provenance)[1:], *added]} if added else provenance


def _identify(origin: Origin) -> str:
    return json.dumps([origin.get(key) for key in ORIGIN_KEYS], sort_keys=True)
