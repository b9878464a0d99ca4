"""Commits, versions and machines that a run's samples were made with, in its provenance.json.

The file describes the first process that worked on the run; `resumed` lists the others that differ.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbench.core.files import parse_json, read_text
from kvbench.runs.record.folder import RunFolder

FILE = "provenance.json"
ORIGIN_KEYS = ("code", "versions", "gpu", "cpu", "machine", "threads", "processors")
"""Keys by which two origins are distinguished."""
KEYS = (*ORIGIN_KEYS, "device", "load", "started")
"""Keys of an entry of `resumed`."""

Origin = Mapping[str, object]


def list_origins(provenance: Origin | None) -> list[Origin]:
    """Return the origins in the contents of provenance.json, the first process's at the beginning."""
    if not provenance:
        return []
    resumed = provenance.get("resumed")
    others = resumed if isinstance(resumed, list) else []
    return [provenance, *(one for one in others if isinstance(one, Mapping))]


def add_origins(folder: RunFolder, origins: Iterable[Origin]) -> None:
    """Add origins to a run's provenance.json, except known ones; nothing is written if the file does not exist.

    Raises:
        ConfigError: the file is damaged.
    """
    with folder.locked():
        provenance = folder.read_json(FILE)
        if provenance is None:
            return
        known = [_identify(one) for one in list_origins(provenance)]
        added: list[Origin] = []
        for origin in origins:
            if _identify(origin) not in known:
                known.append(_identify(origin))
                added.append({key: origin[key] for key in KEYS if key in origin})
        if added:
            resumed = [*list_origins(provenance)[1:], *added]
            folder.write(FILE, json.dumps({**provenance, "resumed": resumed}, indent=1))


def read_origins(path: Path) -> list[Origin]:
    """Return the origins of the run in a folder; none if they are not recorded or the file is damaged."""
    try:
        provenance = parse_json(read_text(path / FILE))
    except (OSError, ValueError):
        return []
    return list_origins(provenance) if isinstance(provenance, dict) else []


def _identify(origin: Origin) -> str:
    return json.dumps([origin.get(key) for key in ORIGIN_KEYS], sort_keys=True)
