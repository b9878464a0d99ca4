"""Arguments of the commands `publish` and `verify`: folders, and values by key."""

from collections.abc import Collection, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.data.names import MAX_LETTERS, clean_name


def split_arguments(
    arguments: Sequence[str], keys: Collection[str], usage: str
) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Return the folders and the values by key of a command; a folder's name may contain `=`.

    Args:
        arguments: arguments after the name of the command.
        keys: keys of the command.
        usage: line that describes the command and begins with `kvbench` and the command's name.

    Raises:
        ConfigError: a key is unknown, repeated or has no value.
    """
    folders: list[Path] = []
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if Path(argument).is_dir() or not equals:
            folders.append(Path(argument).expanduser())
        elif key not in keys or not value or key in values:
            raise ConfigError(
                f"{usage.split()[1]}: {argument}: no such key, no value, or given twice; {usage}"
            )
        else:
            values[key] = value
    return tuple(folders), values


def read_name(key: str, text: str) -> str:
    """Return a name without surrounding spaces; raise ConfigError if it is empty, too long or not printable."""
    name = clean_name(text)
    if name is None:
        raise ConfigError(
            f"{key}={text[:MAX_LETTERS]!r}: must be a name of 1 to {MAX_LETTERS} printable characters"
        )
    return name
