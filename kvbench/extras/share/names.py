"""Names of people in the words of a command."""

from kvbench.core.config import ConfigError
from kvbench.core.names import MAX_LETTERS, clean_name


def read_name(key: str, text: str) -> str:
    """Return a name without spaces around it.

    Raises:
        ConfigError: it is empty, too long, or has characters that cannot be printed.
    """
    name = clean_name(text)
    if name is None:
        raise ConfigError(
            f"{key}={text[:MAX_LETTERS]!r}: must be a name of 1 to {MAX_LETTERS} printable letters"
        )
    return name
