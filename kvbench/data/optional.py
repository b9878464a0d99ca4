"""Import of polars, an optional dependency."""

import importlib
from types import ModuleType

from kvbench.core.config import ConfigError


def import_polars() -> ModuleType:
    """Return the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("polars")
    except ImportError:
        raise ConfigError('polars is missing; install it with pip install "kvbench[data]"') from None
