"""Objects of a configuration, instantiated by Hydra 1.3 or 1.4."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from kvbench.core.config import list_nodes

VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Argument that Hydra 1.3 needs for its own defaults, and that later versions deprecate."""


def instantiate(values: Mapping[str, Any]) -> Any:
    """Return the object of a node (or of plain values) with `_target_`, including nested objects.

    Raises:
        InstantiationException: the class raised an error, which is the cause; the message names the key.
    """
    node = values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))
    with allow_targets(node):
        try:
            return hydra.utils.instantiate(node)
        except Exception as error:  # a class may raise anything
            keys = [note for note in getattr(error, "__notes__", ()) if note.startswith("full_key: ")]
            if not keys:  # Hydra 1.3 wraps the error; 1.4 adds a note
                raise
            raise InstantiationException(keys[0]) from error


def allow_targets(node: DictConfig | None = None) -> AbstractContextManager[object]:
    """Return a context in which Hydra 1.4 may instantiate classes of kvbench and a node's packages; 1.3 has no limit.

    A plugin may name classes of any package, because the user installed it or named it in `hydra.searchpath`. The
    standard library is never allowed: its functions can run programs or delete files.
    """
    allow = getattr(hydra.utils, "execution_whitelist", None)
    if allow is None:
        return nullcontext()
    targets = list_targets(OmegaConf.to_container(node, resolve=True)) if node is not None else ()
    packages = {target.partition(".")[0] for target in targets} - sys.stdlib_module_names
    return allow([f"{package}.*" for package in sorted({"kvbench", *packages})])


def list_targets(value: object) -> Iterator[str]:
    """Yield the classes and functions that a configuration names."""
    for _, node in list_nodes(value):
        if isinstance(target := node["_target_"], str):
            yield target
            if target.startswith("hydra.utils.get_"):  # imports what `path` names
                yield str(node.get("path"))
