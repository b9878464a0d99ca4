"""Checks of configuration files in folders that plugins or `hydra.searchpath` add."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError
from yaml import MarkedYAMLError

from kvbench.core.config import ConfigError

REMEDY = "write plain YAML in UTF-8: no tags, spaces for indentation, each key once"
ONE_CLASS = ("model", "method", "prompts", "logger")
"""Groups whose choices are objects of one class."""

SWEEP_PATH = ("hydra", "sweeper", "params")
"""Groups of keys that hold the values of a sweep."""


class AddedFile(NamedTuple):
    """A configuration file of an added folder; `name` is its path in the folder, without suffix."""

    source: ConfigSource
    name: str

    def __str__(self) -> str:
        return f"{self.source.full_path()}/{self.name}.yaml"


def list_files(source: ConfigSource, group: str = "") -> Iterator[AddedFile]:
    """Yield the files of a group, or of all groups, of an added folder."""
    prefix = f"{group}/" if group else ""
    for name in source.list(group, ObjectType.CONFIG):
        yield AddedFile(source, prefix + name)
    for inner in source.list(group, ObjectType.GROUP):
        yield from list_files(source, prefix + inner)


def check_files(files: Sequence[AddedFile], repository: Any) -> None:
    """Check that files can be parsed, are complete and do not include themselves.

    Args:
        files: of all added folders.
        repository: Hydra's repository of files.

    Raises:
        ConfigError: names the file, its line or key, and the remedy.
    """
    included = {file.name: list(_read_defaults(file, repository)) for file in files}
    for file in files:
        if file.name in _follow(file.name, included):
            raise ConfigError(f"{file}: defaults: the file includes itself; remove the entry that leads back")


def _read_defaults(file: AddedFile, repository: Any) -> Iterator[str]:
    """Yield the names of files in the defaults list of a file, which is checked."""
    try:
        loaded = repository.load_config(file.name)
    except Exception as error:  # YAML, OmegaConf and Hydra have many
        raise ConfigError(f"{file}: {_describe(error)}") from None
    if not isinstance(loaded.config, DictConfig):
        raise ConfigError(f"{file}: is not a group of keys; write `key: value` lines")
    group = file.name.rpartition("/")[0]
    if group == "sweeps":
        _check_sweep(file, OmegaConf.to_container(loaded.config, resolve=False))
    others = [one for one in loaded.defaults_list if not one.is_self()]
    if group in ONE_CLASS and not others and "_target_" not in loaded.config:
        raise ConfigError(f"{file}: has no key _target_; name the class of this {group}")
    for one in others:
        one.update_parent(group, "")
        name = one.get_name()
        if one.is_override() or not isinstance(name, str) or "${" in name:
            continue
        path = one.get_config_path()
        if not one.is_optional() and name != "???" and not repository.config_exists(path):
            raise ConfigError(f"{file}: defaults: there is no file {path}; correct the entry")
        yield path


def _check_sweep(file: AddedFile, value: object) -> None:
    """Check that the values of a sweep are a group of keys."""
    for depth, name in enumerate(SWEEP_PATH, 1):
        if not isinstance(value, Mapping) or name not in value:
            return
        value = value[name]
        if not isinstance(value, Mapping):
            key = ".".join(SWEEP_PATH[:depth])
            raise ConfigError(f"{file}: {key}: must be a group of keys; name each swept key with its values")


def _describe(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}; {REMEDY}"
    if isinstance(error, GrammarParseError):
        return f"{str(error).splitlines()[0]} is no interpolation; write ${{key}}, or \\${{ for the letters"
    if isinstance(error, RecursionError):
        return "refers to itself, or is nested too deeply; remove the alias (*name)"
    return f"{' '.join(str(error).split()) or type(error).__name__}; {REMEDY}"


def _follow(name: str, included: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of all files that a file includes, at any depth."""
    found: set[str] = set()
    rest = list(included[name])
    while rest:
        one = rest.pop()
        if one not in found:
            found.add(one)
            rest += included.get(one, ())
    return found
