"""Search path of configuration files, kvbench's, plugins' and `hydra.searchpath`, and checks of added files."""

import importlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from typing import Any, NamedTuple

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError
from yaml import MarkedYAMLError

from kvbench.cli.config.checks import check_kind
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.loader import compose_words, keep_files, locate_file
from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.core.plugins import find_plugins

log = logging.getLogger(__name__)

REMEDY = "write plain YAML in UTF-8: no tags, spaces for indentation, each key once"
ONE_CLASS = ("model", "method", "prompts", "logger")
"""Groups each of whose choices is one object."""

SWEEP_PATH = ("hydra", "sweeper", "params")
"""Groups of keys that hold the values of a sweep."""


class PluginSearchPath(SearchPathPlugin):
    """Plugin of Hydra that appends folders of plugins and of `hydra.searchpath` after kvbench's own.

    Hydra itself reads `hydra.searchpath` only for composition, not for `--help`, `method=glob(*)` and lists of choices.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append every folder to Hydra's search path, once."""
        folders = [(f"plugin {one.package} {one.version}", f"pkg://{one.module}") for one in find_plugins()]
        named = [word for word in sys.argv[1:] if word.startswith("hydra.searchpath=")]
        for override in OverridesParser.create().parse_overrides(named):
            values = override.value()
            folders += [("hydra.searchpath", str(one)) for one in values] if isinstance(values, list) else []
        for provider, folder in folders:
            if all(folder != known.path for known in search_path.get_path()):
                search_path.append(provider, folder)


def list_choices(group: str) -> list[str]:
    """Return the choices of `group=`, including plugins'; Hydra must be initialised."""
    keep_files()  # Hydra's own repository copies every stored file for each list
    return GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)


def list_variants(group: str) -> list[str]:
    """Return the choices of `group=` and of its subfolders, such as `cake/text`; Hydra must be initialised."""
    loader = GlobalHydra.instance().config_loader()
    names = list_choices(group)
    for folder in loader.get_group_options(group, ObjectType.GROUP):
        names += [f"{folder}/{name}" for name in list_variants(f"{group}/{folder}")]
    return sorted(names)


def describe_choice(group: str, name: str) -> str:
    """Return the comment at the top of the file of a choice; Hydra must be initialised."""
    file = f"{group}/{name}.yaml"
    source = next(one for one in _list_sources() if one.is_config(file))
    text = read_text(locate_file(source, file))
    opening = takewhile(re.compile("#").match, text.splitlines())
    lines = (line.removeprefix("#").strip() for line in opening)
    return " ".join(line for line in lines if not line.startswith("@package"))


def list_methods(family: str) -> list[str]:
    """Return the choices of `method=` whose classes are for models of a family; Hydra must be initialised."""
    loader: Any = GlobalHydra.instance().config_loader()
    found = []
    for name in list_choices("method"):
        with leaving_out(f"method={name}"):
            node = loader.repository.load_config(f"method/{name}").config
            if "_target_" not in node:  # the file's base names it; composing takes 20 times as long
                node = hydra.compose(f"method/{name}").method
            if family in check_kind(node, "method", "method").families:  # type: ignore[attr-defined]
                found.append(name)
    return found


def make_each(group: str, names: Sequence[str], job: DictConfig | None = None) -> Iterator[tuple[str, Any]]:
    """Yield choices with their objects; Hydra must be initialised.

    A choice that cannot be composed, or whose class cannot be imported, is left out and named in a warning.

    Args:
        group: group of the configuration.
        names: choices of the group.
        job: configuration whose other settings they refer to; None for the defaults.
    """
    job = compose_words([]) if job is None else job.copy()
    for name in names:
        with leaving_out(f"{group}={name}"):
            node = hydra.compose(f"{group}/{name}")  # composing the file alone is much faster than a job
            for part in f"{group}/{name}".split("/")[:-1]:
                node = node[part]
            check_kind(node, group, group)
            with open_dict(job):
                job[group] = node
            yield name, instantiate(job[group])


@contextmanager
def leaving_out(choice: str) -> Iterator[None]:
    """Log an error of a choice in one line, so that a user's broken file stops no command that lists all choices."""
    try:
        yield
    except Exception as error:  # its class may raise anything
        cause = error.__cause__ or error
        log.warning("left out: %s: %s: %s", choice, type(cause).__name__, " ".join(str(cause).split()))


def check_search_path() -> None:
    """Check that every added folder is readable and has new, valid files only; Hydra must be initialised.

    Raises:
        ConfigError: a folder is not readable, a name exists already, or a file is damaged.
    """
    loader: Any = GlobalHydra.instance().config_loader()
    known = (sources := _list_sources())[:1]
    files: list[AddedFile] = []
    for source in sources[1:]:
        _check_readable(source)
        for group in source.list("", ObjectType.GROUP):
            for choice in source.list(group, ObjectType.CONFIG):
                if first := next((other for other in known if other.is_config(f"{group}/{choice}")), None):
                    raise ConfigError(
                        f"{source.provider}: {group}={choice} of {source.full_path()} exists already in "
                        f"{first.full_path()}; rename the file"
                    )
        known.append(source)
        files += list_files(source)
    if files:
        check_files(files, loader.repository)


def find_added(group: str, words: Sequence[str]) -> list[str]:
    """Return the paths of files of a group in added folders that words choose; Hydra must be initialised."""
    pairs = (word.partition("=") for word in words)
    values = [value for key, _, value in pairs if key.partition("@")[0] == group]
    chosen = {f"{group}/{name}" for value in values for name in value.strip("[]").split(",")}
    if not chosen:
        return []
    files = (file for source in _list_sources()[1:] for file in list_files(source))
    return [str(file) for file in files if file.name in chosen]


def _list_sources() -> list[ConfigSource]:
    """Return kvbench's own source of configuration files, then the added sources."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [source for source in sources if source.provider not in ("hydra", "schema")]


def _check_readable(source: ConfigSource) -> None:
    where, remedy = f"{source.provider}: {source.full_path()}", "repair the package or uninstall it"
    if source.provider == "hydra.searchpath":
        remedy = "name a folder (file://folder), or a package (pkg://package.conf) on PYTHONPATH"
    try:
        if source.scheme() == "pkg":
            importlib.import_module(source.path)
    except Exception as error:  # a package may raise anything while it is imported
        raise ConfigError(f"{where} cannot be imported ({type(error).__name__}: {error}); {remedy}") from None
    if not source.available():
        problem = "has no __init__.py" if source.scheme() == "pkg" else "is not a folder"
        raise ConfigError(f"{where} {problem}; {remedy}")


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
        files: files of all added folders.
        repository: Hydra's repository of files.

    Raises:
        ConfigError: a file is damaged, incomplete or recursive; the message names it, its line or key, and the remedy.
    """
    named = {file.name: file for file in files}
    try:
        TopologicalSorter(
            {name: list(_read_defaults(file, repository)) for name, file in named.items()}
        ).prepare()
    except CycleError as error:
        file = named[min(error.args[1])]
        raise ConfigError(
            f"{file}: defaults: the file includes itself; remove the entry that leads back"
        ) from None


def _read_defaults(file: AddedFile, repository: Any) -> Iterator[str]:
    """Yield the names of files in the defaults list of a file, which is checked."""
    try:
        loaded = repository.load_config(file.name)
    except Exception as error:  # YAML, OmegaConf and Hydra raise many classes
        raise ConfigError(f"{file}: {describe_slip(error)}") from None
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


def describe_slip(error: Exception) -> str:
    """Return what is wrong in a file of the configuration, and the remedy."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}; {REMEDY}"
    if isinstance(error, GrammarParseError):
        return f"{str(error).splitlines()[0]} is not an interpolation; write ${{key}}, or \\${{ for text"
    if isinstance(error, RecursionError):
        return "refers to itself, or is nested too deeply; remove the alias (*name)"
    return f"{' '.join(str(error).split()) or type(error).__name__}; {REMEDY}"
