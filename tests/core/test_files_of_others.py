"""Files of other people are opened by one function; every other call that opens a file is listed with its reason."""

import ast
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbench.core import checkpoint
from kvbench.core.config import UserError
from kvbench.core.files import MAX_BYTES, MAX_STREAMED, check_file, hash_path, read_bytes, read_text
from kvbench.data.frames import read_table
from kvbench.eval.distribution.dataset import Packed, Pictures
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.pictures import open_picture
from kvbench.forced.record import ScoredText
from kvbench.models.files import checkpoints
from kvbench.models.files.gguf import read_gguf
from kvbench.models.parts.tokens import open_tokenizer
from kvbench.runs.record.folder import RunFolder, RunName
from tests.support.places import ROOT

OPENS = {
    "open", "fdopen", "read_text", "read_bytes", "safe_open", "load_file", "is_zipfile", "ZipFile", "mmap", "memmap",
    "fromfile", "genfromtxt", "loadtxt", "imread", "copyfile", "copy2", "copytree", "scan_parquet", "read_parquet",
    "scan_csv", "read_csv", "scan_ndjson", "from_file", "from_pretrained", "Image.open", "np.load", "torch.load",
    "torch.jit.load", "OmegaConf.load",
}  # fmt: skip
"""Names of functions that open a path, with the module where another function has the same name."""
OURS = {"open_file", "read_bytes", "read_text", "check_file"}
"""Functions of kvbench.core.files that check a file; a call whose argument is one of them is checked too."""
REASONS: dict[str, dict[str, int]] = {
    "a weight file, which `Weight.require` has hashed through `open_file`": {
        "eval/alignment/clip.py": 5, "eval/alignment/judge.py": 1, "eval/alignment/vqa.py": 2,
        "eval/networks.py": 1, "eval/paired/dists.py": 2, "eval/paired/lpips.py": 1,
        "eval/spaces/dinov2.py": 1, "eval/spaces/dreamsim.py": 2, "eval/spaces/efficientnet.py": 1,
        "eval/spaces/inception.py": 1, "eval/spaces/scenes.py": 1,
    },
    "a member of an archive that was checked": {"eval/distribution/dataset.py": 1},
    "a file that `open_file` opened, or bytes": {"eval/files/pictures.py": 1},
    "a file of this package": {
        "eval/registry.py": 2, "kvbench/cli/config/compose.py": 1, "kvbench/cli/config/help.py": 1,
        "kvbench/extras/share/verify/named_files.py": 1, "kvbench/cli/tasks/new.py": 1,
        "kvbench/dashboard/page.py": 1, "kvbench/dashboard/vendor.py": 2, "kvbench/prompts/text_files.py": 1,
        "kvbench/report/papers/published.py": 1, "kvbench/runs/code.py": 1,
    },
    "the null device, and the streams of this process": {"kvbench/cli/streams.py": 3},
    "a file that is written": {
        "kvbench/cli/submit/summary.py": 1, "kvbench/cli/submit/ray.py": 1, "kvbench/cli/workers/log.py": 1,
        "kvbench/core/claims.py": 1, "kvbench/models/files/stored.py": 1,
    },
    "the function itself; a file just written; the kernel's identifier of this boot": {"kvbench/core/files.py": 4},
    "an address; a file that is written": {"kvbench/core/receive.py": 2},
    "`Ledger.open` opens no file": {"kvbench/engine/cache.py": 1},
    "`read` has checked the file": {"kvbench/models/files/checkpoints.py": 3},
    "`Cursor.read_text`, and a file that `open_file` opened": {"kvbench/models/files/gguf.py": 5},
    "the kernel's list of mapped files": {"kvbench/models/files/mapped.py": 1},
    "`DrawnTokens.open` opens no file": {"kvbench/models/token_loop.py": 1},
    "files of a folder that transformers reads; they are hashed through `open_file`": {
        "kvbench/models/parts/text.py": 2, "kvbench/models/text_tokens.py": 1,
    },
    "a file that is written, after `read_bytes`": {"kvbench/runs/record/folder.py": 1},
    "what the kernel says of the processor": {"kvbench/runs/record/machine.py": 2},
    "`Tracker.open` opens no file": {"kvbench/runs/score/tracker.py": 2},
}  # fmt: skip
"""Files and the number of their calls, by the reason."""


def list_calls(path: Path) -> Iterator[str]:
    """Yield the calls of a module that open a path without the one function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in OURS or not {called, called.rpartition(".")[2]} & OPENS:
            continue
        inner = {ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
        if not inner & OURS:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node):.90}"


def test_every_other_call_that_opens_a_file_has_its_reason() -> None:
    files = [path for folder in ("kvbench", "eval") for path in sorted((ROOT / folder).rglob("*.py"))]
    calls = [call for path in files for call in list_calls(path)]
    found = Counter(call.partition(":")[0] for call in calls)
    expected = {name: count for counts in REASONS.values() for name, count in counts.items()}
    wrong = {name for name in found | expected if found.get(name) != expected.get(name)}
    assert not wrong, "\n".join(
        [*sorted(wrong), *(call for call in calls if call.partition(":")[0] in wrong)]
    )


def open_run(path: Path) -> object:
    """A run's samples, one of which is the file."""
    images = path.parent / "images"
    images.mkdir()
    path.rename(images / "000000.png")
    record = {"index": 0, "seed": 0, "prompt": "a", "sha256": "0"}
    (path.parent / "samples.jsonl").write_text(json.dumps(record) + "\n")
    return ImageSet(path.parent)


def open_records(path: Path) -> object:
    """The records of a run, in the file."""
    folder = path.parent / "model" / "method-1-0"
    folder.mkdir(parents=True)
    path.rename(folder / "samples.jsonl")
    return RunFolder(path.parent, "model", RunName.of(folder.name)).recorded()


DOORS: dict[str, Callable[[Path], object]] = {
    "a.png": lambda path: open_picture(path).__enter__(),
    "b.png": open_run,
    "c.png": lambda path: Pictures(path.parent),
    "samples.jsonl": open_records,
    "a.json": read_text,
    "config.yaml": read_bytes,
    "weights.pth": hash_path,
    "calibration.safetensors": checkpoint.load,
    "model.safetensors": checkpoints.read,
    "model.pth": checkpoints.read,
    "model.gguf": read_gguf,
    "000000.safetensors": ScoredText.read,
    "tokenizer.json": open_tokenizer,
    "samples.parquet": lambda path: read_table(path, 1),
    "reference.npz": Packed,
}
"""Readers of untrusted files, by the name of the file."""


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
@pytest.mark.parametrize("name", DOORS)
def test_pipes_and_devices_in_place_of_files_are_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)

    def stop(*_: object) -> None:
        raise AssertionError("it waits")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        with pytest.raises((OSError, ValueError, UserError), match="not a regular file"):
            DOORS[name](tmp_path / name)
    finally:
        signal.alarm(0)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(OSError, match=r"larger than 256 MiB: .*a\.json"):
        read_bytes(path)
    with path.open("wb") as file:
        file.truncate(MAX_STREAMED + 1)
    for door in (hash_path, check_file, checkpoints.read):
        with pytest.raises((OSError, UserError), match="larger than 1048576 MiB"):
            door(path)


def test_what_is_a_file_is_read_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    link.symlink_to(path)
    assert (read_bytes(link), read_text(link)) == (path.read_bytes(), "a\nb\nc\n")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "c.txt")
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(path)
    assert read_text(path, errors="replace") == "\ufffd"
