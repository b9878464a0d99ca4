"""`config.json` of a language model's folder or repository, or the same keys of its GGUF file."""

import re
from collections.abc import Mapping
from dataclasses import replace

from kvbench.core.files import resolve_path
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.generation_config import read_gguf_keys, read_object
from kvbench.models.files.weights import Source
from kvbench.models.llama.gguf_config import make_config

CONFIG = "config.json"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Pattern of a repository's name on the Hub, owner/name."""


def find_hub_name(source: Source) -> Source:
    """Return the source; a path that does not exist and has the form owner/name becomes a repository of the Hub."""
    path = source.path
    if path is None or HUB_NAME.fullmatch(path) is None or resolve_path(path).exists():
        return source
    return replace(source, path=None, repo=path)


def read_config(source: Source) -> tuple[Mapping[str, object], str]:
    """Return the contents of a model's `config.json`, and the prefix of messages about it: config key and path.

    Of a repository that has not been downloaded, only this file is. A GGUF file's metadata are returned under
    the same keys.

    Raises:
        WeightsError: the model or the file is missing, or the file is not a JSON object or a GGUF file of a decoder.
    """
    if source.path is None and source.repo is None:
        raise WeightsError(
            f"{source.key}: no model given; set {source.key}.path to its folder, or to its name owner/name on the Hub"
        )
    if (found := read_gguf_keys(source, make_config)) is not None:
        return found, f"{source.key}: {source.locate()}"
    folder = source.find()
    if folder is not None and not folder.is_dir():
        raise WeightsError(f"{source.key}: {folder} is a file; give the model's folder, with {CONFIG}")
    path = replace(source, file=CONFIG).locate() if folder is None else folder / CONFIG
    if not path.is_file():
        raise WeightsError(
            f"{source.key}: {folder} has no {CONFIG}, which has the model's shape; give the model's folder"
        )
    return read_object(source, path), f"{source.key}: {path}"
