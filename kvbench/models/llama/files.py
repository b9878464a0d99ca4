"""Settings in a language model's folder, repository or GGUF file: `config.json` and `generation_config.json`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from kvbench.core.files import parse_json, read_text, resolve_path
from kvbench.models.files.checkpoints import GGUF, WeightsError
from kvbench.models.files.gguf import Gguf, read_gguf
from kvbench.models.files.weights import Source
from kvbench.models.llama.gguf_config import make_config, make_generation_config

CONFIG, GENERATION = "config.json", "generation_config.json"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Form of a repository's name."""


def find_hub_name(source: Source) -> Source:
    """Return a source whose path, if it does not exist and has the form owner/name, is a repository of the Hub."""
    path = source.path
    if path is None or HUB_NAME.fullmatch(path) is None or resolve_path(path).exists():
        return source
    return replace(source, path=None, repo=path)


def read_config(source: Source) -> tuple[Mapping[str, object], str]:
    """Return the contents of a model's `config.json`, and the config key and path of the file for messages.

    Of a repository that has not been fetched, this file alone is downloaded. A GGUF file's metadata are returned under
    the same keys.

    Raises:
        WeightsError: the model or the file is missing, or the file is not a JSON object or a GGUF file of a decoder.
    """
    if source.path is None and source.repo is None:
        raise WeightsError(
            f"{source.key}: no model given; set {source.key}.path to its folder, or to its name owner/name on the Hub"
        )
    if (path := _find_gguf(source)) is not None:
        return _read_gguf(source, path, make_config), f"{source.key}: {path}"
    folder = source.find()
    path = replace(source, file=CONFIG).locate() if folder is None else _look_inside(source, folder) / CONFIG
    if not path.is_file():
        raise WeightsError(
            f"{source.key}: {folder} has no {CONFIG}, which has the model's shape; give the model's folder"
        )
    return _read(source, path)


def read_generation_config(source: Source) -> Mapping[str, object]:
    """Return the contents of a model's `generation_config.json`, after downloading the model; empty without the file.

    Those of a GGUF file are the stop tokens of its tokenizer.

    Raises:
        WeightsError: the model is missing, or the file is not a JSON object.
    """
    if (path := _find_gguf(source)) is not None:
        return _read_gguf(source, path, make_generation_config)
    path = _look_inside(source, source.locate()) / GENERATION
    return _read(source, path)[0] if path.is_file() else {}


def _find_gguf(source: Source) -> Path | None:
    """Return the GGUF file that a source is, after downloading it; None for other sources."""
    name = source.path or source.file
    return source.locate() if name is not None and name.endswith(GGUF) else None


def _read_gguf(
    source: Source, path: Path, make: Callable[[Gguf], Mapping[str, object]]
) -> Mapping[str, object]:
    try:
        return make(read_gguf(path))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{source.key}: {path}: {error}") from None


def _look_inside(source: Source, folder: Path) -> Path:
    if not folder.is_dir():
        raise WeightsError(f"{source.key}: {folder} is a file; give the model's folder, with {CONFIG}")
    return folder


def _read(source: Source, path: Path) -> tuple[Mapping[str, object], str]:
    try:
        values = parse_json(read_text(path))
        if not isinstance(values, Mapping):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{source.key}: {path}: cannot be read ({error}); copy the model's file again"
        ) from None
    return values, f"{source.key}: {path}"
