"""What Weights & Biases wrote while it was offline: the records of a `.wandb` file.

The file has seven bytes of its own and is then a log in LevelDB's format: blocks of 32 KiB in which every piece of a
record has a checksum (4 bytes), its length (2) and its kind (1: whole, 2: first, 3: middle, 4: last). Records are
messages of W&B's own protocol.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

MAGIC, BLOCK, HEAD = b":W&B", 32768, struct.Struct("<IHB")
START, ENDS = 7, (1, 4)


@dataclass(frozen=True)
class Entry:
    """A run as W&B will have it: its message, configuration, values of each step, media, and staged files by name."""

    run: Any
    config: dict[str, Any]
    history: list[dict[str, Any]]
    files: Path
    staged: dict[str, Path]

    def table(self, key: str) -> dict[str, Any]:
        """Columns and data of a table of the last step."""
        found: dict[str, Any] = json.loads((self.files / self.history[-1][f"{key}.path"]).read_text())
        return found


def read_entry(folder: Path) -> Entry:
    """The only run that a folder has been sent as; the process that writes it for this one has ended then."""
    wandb.teardown()
    [path] = (folder / "wandb").glob("offline-run-*/*.wandb")
    records = list(read_records(path.read_bytes()))
    run = [record for kind, record in records if kind == "run"][-1]
    history = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.item}
        for kind, record in records
        if kind == "history"
    ]
    artifacts = [record for kind, record in records if kind == "artifact"]
    staged = {entry.path: Path(entry.local_path) for one in artifacts for entry in one.manifest.contents}
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    return Entry(run, config, history, path.parent / "files", staged)


def read_records(content: bytes) -> Iterator[tuple[str, Any]]:
    """Kind and message of every record of a file."""
    assert content[: len(MAGIC)] == MAGIC
    at, whole = START, b""
    while at < len(content):
        if (left := BLOCK - at % BLOCK) < HEAD.size:
            at += left
            continue
        _, length, kind = HEAD.unpack_from(content, at)
        whole += content[at + HEAD.size : at + HEAD.size + length]
        at += HEAD.size + length
        if kind in ENDS:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            name, whole = str(record.WhichOneof("record_type")), b""
            yield name, getattr(record, name)
