"""Files that a stored configuration may name: kvbench's own, and files in a folder that the user names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError, list_nodes
from kvbench.core.files import resolve_path
from kvbench.models.llama.files import HUB_NAME
from kvbench.scenes.names import find_vocabulary

ASSETS = "pkg://kvbench/"
"""Prefix of paths that every stored configuration may name."""
FILE_KEYS: Mapping[str, Sequence[str]] = {
    "prompts": ("path", "rewritten"),
    "method": ("orders", "budgets"),
    "eval": ("path", "trunk_path", "clip_path", "tokenizer_path", "statistics", "questions", "folder"),
}
"""Keys of each group whose values are paths of files; null means no file, or a file of kvbench."""
GETTER = "hydra.utils.get_method"
"""Function of Hydra that a configuration may name; it imports a function without calling it."""


def place_files(values: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Replace recorded paths of files except weights by paths that may be read; return the keys of the user's files.

    Args:
        values: the configuration, which is changed.
        folder: the user's folder; None if the user names none.

    Raises:
        ConfigError: a file may not be read, see `find_file` and `find_captions`.
    """
    for _, node in list_nodes(values["model"]):
        if "captions" in node:
            node["captions"] = find_captions(node["captions"], folder)
    sections = {group: values.get(group) for group in ("prompts", "method")}
    sections |= {f"eval.{name}": node for name, node in values.get("eval", {}).items()}
    named = [
        (f"{section}.{key}", key, inner)
        for section, node in sections.items()
        for _, inner in list_nodes(node)
        for key in FILE_KEYS[section.partition(".")[0]]
        if inner["_target_"] != GETTER  # its `path` names a function
    ]
    if isinstance(calibrate := values.get("calibrate"), dict):
        named.append(("calibrate.prompts", "prompts", calibrate))
    user_keys = []
    for name, key, node in named:
        if node.get(key) is not None:
            node[key] = find_file(name, str(node[key]), folder)
            if folder is not None and Path(node[key]).is_relative_to(folder.absolute()):
                user_keys.append(name)
    return user_keys


def find_file(key: str, text: str, folder: Path | None) -> str:
    """Return the path of a packaged file, or of the file or folder of the same name in the user's folder.

    Raises:
        ConfigError: `text` is not a file of kvbench, and the user's folder has none of its name.
    """
    if text in list_packaged() or (text.startswith(ASSETS) and _is_asset(resolve_path(text))):
        return str(resolve_path(text))
    if (path := _find_own(text, folder)) is not None:
        return path
    raise ConfigError(f"{key}={text:.200}: is not read; put it into a folder and add weights=FOLDER")


def _find_own(text: str, folder: Path | None) -> str | None:
    """Return the path of the file or folder of the same name in the user's folder; None if there is none."""
    name = Path(text).name
    if folder is None or name in ("", "..") or not (folder / name).exists():
        return None
    return str((folder / name).absolute())


def place_weights(model: Mapping[str, Any], folder: Path | None) -> None:
    """Replace missing weights by weights of the same name in the user's folder.

    A repository that no model of kvbench names is not downloaded, because anybody may own it.

    Args:
        model: section of the configuration, which is changed.
        folder: the user's folder; None if the user names none.

    Raises:
        ConfigError: weights would be downloaded from another repository.
    """
    sources = model.get("sources")
    for part, source in sources.items() if isinstance(sources, dict) else ():
        if not isinstance(source, dict):
            continue
        path, repo = source.get("path"), source.get("repo")
        if (path is None and repo is None) or (path is not None and resolve_path(str(path)).exists()):
            continue
        named = str(repo if path is None else path)
        is_repository = path is None or HUB_NAME.fullmatch(named) is not None
        is_foreign = is_repository and named not in list_repositories()
        if path is None and not is_foreign:
            continue
        own = _find_own(str(path or source.get("file") or repo), folder)
        if own is not None:
            source["path"] = own
        elif is_foreign:
            raise ConfigError(
                f"model.sources.{part}={named:.200}: is not downloaded, as no model of kvbench names it; put its files "
                "into a folder and add weights=FOLDER"
            )


@cache
def list_repositories() -> frozenset[str]:
    """Return the repositories of the Hub that kvbench's own models name."""
    return _find_in_files("model", r"\brepo: ([\w.-]+/[\w.-]+)")


@cache
def list_packaged() -> frozenset[str]:
    """Return the files of other packages that kvbench's own evaluators name, `pkg://...`."""
    return _find_in_files("eval", r"path: (pkg://[\w./-]+)")


def _find_in_files(group: str, pattern: str) -> frozenset[str]:
    """Return the strings that match a pattern in kvbench's own files of a group."""
    texts = [path.read_text(encoding="utf-8") for path in files("kvbench.conf").joinpath(group).iterdir()]
    return frozenset(name for text in texts for name in re.findall(pattern, text))


def _is_asset(path: str | Path) -> bool:
    """Return whether a path is inside the package kvbench."""
    return ".." not in Path(path).parts and Path(path).is_relative_to(resolve_path(ASSETS))


def find_captions(captions: object, folder: Path | None) -> str:
    """Return `scenes`, or the path of a file of names that may be read.

    Raises:
        ConfigError: the file may not be read, or is not a file of names. Its contents are not quoted.
    """
    path = "scenes" if captions == "scenes" else find_file("model.captions", str(captions), folder)
    try:
        find_vocabulary(path)
    except (OSError, ValueError):
        raise ConfigError(f"model.captions={captions!s:.200}: is not a file of names") from None
    return path


@contextmanager
def hide_reasons(keys: Sequence[str]) -> Iterator[None]:
    """Replace errors, which may quote the user's files, by a ConfigError that names the first of their keys.

    Errors pass if `keys` is empty. The outcome of a verification is shared, and a stranger's configuration chooses
    which file is read in which format.
    """
    try:
        yield
    except Exception as error:  # a file that is read as another format may raise anything
        if not keys:
            raise
        raise ConfigError(
            f"{keys[0]}: the run cannot be made with the file of weights=FOLDER ({type(error).__name__}); the reason "
            "may quote the file and is not shown here, task=check with this configuration shows it"
        ) from None
