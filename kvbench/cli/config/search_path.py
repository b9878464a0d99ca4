"""Search path of configuration files: kvbench's, plugins', and `hydra.searchpath`."""

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
import hydra.utils
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from kvbench.cli.config.added_files import AddedFile, check_files, list_files
from kvbench.core.config import ConfigError
from kvbench.core.plugins import find_plugins

log = logging.getLogger(__name__)


class PluginSearchPath(SearchPathPlugin):
    """Appends the folders of plugins and of `hydra.searchpath` to Hydra's search path, after kvbench's own.

    Hydra itself reads `hydra.searchpath` only for composition, not for `--help`, `method=glob(*)` and lists of choices.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append every folder once."""
        for provider, folder in _list_folders():
            if all(folder != known.path for known in search_path.get_path()):
                search_path.append(provider, folder)


def _list_folders() -> Iterator[tuple[str, str]]:
    for plugin in find_plugins():
        yield f"plugin {plugin.package} {plugin.version}", f"pkg://{plugin.module}"
    named = [word for word in sys.argv[1:] if word.startswith("hydra.searchpath=")]
    for override in OverridesParser.create().parse_overrides(named):
        folders = override.value()
        for folder in folders if isinstance(folders, list) else ():
            yield "hydra.searchpath", str(folder)


def list_choices(group: str) -> list[str]:
    """Return the choices of `group=`, including plugins'; Hydra must be initialised."""
    return GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)


def list_methods(family: str) -> list[str]:
    """Return the choices of `method=` for models of a family; Hydra must be initialised.

    A method whose class cannot be imported is left out, and named in a warning. Only a file without its own
    `_target_` is composed, because composing all takes seconds.
    """
    loader: Any = GlobalHydra.instance().config_loader()
    names = []
    for name in list_choices("method"):
        with leaving_out(f"method={name}"):
            own = loader.repository.load_config(f"method/{name}").config
            target = own.get("_target_") or hydra.compose(f"method/{name}").method._target_
            kind: Any = hydra.utils.get_class(target)
            if family in kind.families:
                names.append(name)
    return names


@contextmanager
def leaving_out(choice: str) -> Iterator[None]:
    """Log an error of a choice in one line; a file of the user's stops no command that lists all of them."""
    try:
        yield
    except Exception as error:  # its class may raise anything
        cause = error.__cause__ or error
        log.warning("left out: %s: %s: %s", choice, type(cause).__name__, " ".join(str(cause).split()))


def check_search_path() -> None:
    """Check that every added folder is readable and brings new and valid files only; Hydra must be initialised.

    Raises:
        ConfigError: a folder is not readable, a name exists already, or a file is damaged.
    """
    loader: Any = GlobalHydra.instance().config_loader()
    own, *others = _list_sources()
    known = [own]
    files: list[AddedFile] = []
    for source in others:
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
    """Return kvbench's own source of files, and the added ones."""
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
