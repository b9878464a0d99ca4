"""Store of features on disk, computed once for a set of images, a protocol and a weight file.

Files are written atomically with a hash of their values. Features are computed again if a file is damaged or was
written with different versions of the libraries that read and resize images.
"""

import importlib.metadata
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from kvbench.core.files import check_file, hash_content, write_whole

log = logging.getLogger(__name__)

INDEX, METADATA = "index", "kvbench"
LIBRARIES = ("torch", "pillow")  # libraries that decode, resize and multiply
MAX_SETS = 4  # maximum number of sets in memory: a run and its reference on two networks

Arrays = Mapping[str, NDArray[np.float32]]

recent: OrderedDict[Path, Arrays] = OrderedDict()
"""Features in memory, by their file in the store; the latest are last."""


@dataclass(frozen=True)
class StoredFeatures:
    """Features of a set of images.

    Attributes:
        arrays: float32 [n, ...] by name, one row per image.
        reused: whether the arrays come from the store instead of the network.
    """

    arrays: Arrays
    reused: bool


def find_folder() -> Path:
    """Return $KVBENCH_FEATURES, or ~/.cache/kvbench/features."""
    return Path(os.environ.get("KVBENCH_FEATURES") or "~/.cache/kvbench/features").expanduser()


def load_features(
    digest: str, protocol: str, sha256: str, indices: Sequence[int], compute: Callable[[], Arrays]
) -> StoredFeatures:
    """Return features from the store, or compute and store them.

    If the store is not writable, a warning is logged and features stay in memory.

    Args:
        digest: digest of the images.
        protocol: name of resizer and network.
        sha256: hash of the weight file.
        indices: index of the sample of each row.
        compute: function that returns float32 arrays with one row per index.

    Raises:
        ValueError: computed features are not finite, or not one row per index.
    """
    path = find_folder() / f"{digest}-{protocol}-{sha256[:8]}.safetensors"
    identity = {"images": digest, "protocol": protocol, "weights": sha256}
    identity |= {name: importlib.metadata.version(name) for name in LIBRARIES}
    stored = recent.get(path) or _read(path, identity, indices)
    arrays = stored
    if arrays is None:
        arrays = compute()
        _check(arrays, protocol, indices)
        _write(path, identity, arrays, indices)
    recent[path] = arrays
    recent.move_to_end(path)
    while len(recent) > MAX_SETS:
        recent.popitem(last=False)
    return StoredFeatures(arrays, reused=stored is not None)


def _check(arrays: Arrays, protocol: str, indices: Sequence[int]) -> None:
    for name, array in arrays.items():
        if len(array) != len(indices):
            raise ValueError(f"{protocol}: {len(array)} rows of {name} for {len(indices)} images")
        finite = np.isfinite(array).reshape(len(array), -1).all(1)
        if not finite.all():
            raise ValueError(f"{protocol}: {name} of image {indices[int(np.argmin(finite))]} are not finite")


def _read(path: Path, identity: Mapping[str, str], indices: Sequence[int]) -> Arrays | None:
    try:
        if not path.is_file():
            return None
        with safe_open(check_file(path), "np") as file:
            metadata = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        log.warning("%s cannot be read (%s): its features are computed again", path, error)
        return None
    if metadata.pop("content", None) != _content(arrays):
        log.warning("%s is damaged: its features are computed again", path)
        return None
    if metadata != identity or arrays.pop(INDEX).tolist() != list(indices):
        log.info("%s was made with other versions or images: its features are computed again", path)
        return None
    return arrays


def _write(path: Path, identity: Mapping[str, str], arrays: Arrays, indices: Sequence[int]) -> None:
    tensors: dict[str, NDArray[np.generic]] = {**arrays, INDEX: np.asarray(indices, np.int64)}
    # A single entry, because the order of several entries varies.
    metadata = json.dumps({**identity, "content": _content(tensors)}, sort_keys=True)
    try:
        # `save_file` makes owner-only files.
        write_whole(path, serialize(tensors, {METADATA: metadata}))
    except (SafetensorError, OSError) as error:
        log.warning("features cannot be kept in %s (%s): the next process computes them again", path, error)


def _content(arrays: Mapping[str, NDArray[np.generic]]) -> str:
    parts: list[str | memoryview] = []
    for name, array in sorted(arrays.items()):
        parts += [f"{name} {array.dtype} {array.shape}\n", np.ascontiguousarray(array).data]
    return hash_content(*parts)
