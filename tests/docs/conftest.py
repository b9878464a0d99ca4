"""Fixtures of the documentation's tests."""

import sys
from collections.abc import Iterator

import pytest

from tests.support.places import ROOT


@pytest.fixture(autouse=True)
def _generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the generator importable, as `docs/conf.py` does."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "generator"]:
        del sys.modules[name]
