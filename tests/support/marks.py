"""Marks of parametrized cases: `make test` runs those that are not slow."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests where a package is missing; they import it themselves, since its import takes seconds."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def slow_except(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases slow that are not quick."""
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [case if is_quick(case) else pytest.param(*own, marks=pytest.mark.slow) for case, own in values]
