"""Words of the commands `publish` and `verify`: folders, and values by key."""

from collections.abc import Collection, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.data.names import MAX_LETTERS, clean_name


def split_words(
    words: Sequence[str], keys: Collection[str], usage: str
) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Return the folders and the values by key of a command; a folder's name may contain `=`.

    Args:
        words: words after the name of the command.
        keys: keys that it has.
        usage: line that describes it, which begins with `kvbench` and its name.

    Raises:
        ConfigError: a key is unknown, comes twice or has no value.
    """
    folders: list[Path] = []
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if Path(word).is_dir() or not equals:
            folders.append(Path(word).expanduser())
        elif key not in keys or not value or key in values:
            raise ConfigError(f"{usage.split()[1]}: {word}: no such key, no value, or given twice; {usage}")
        else:
            values[key] = value
    return tuple(folders), values


def read_name(key: str, text: str) -> str:
    """Return a name without spaces around it.

    Raises:
        ConfigError: it is empty, too long, or has characters that cannot be printed.
    """
    name = clean_name(text)
    if name is None:
        raise ConfigError(
            f"{key}={text[:MAX_LETTERS]!r}: must be a name of 1 to {MAX_LETTERS} printable characters"
        )
    return name
