"""Shared set-up: the checkout importable, one thread per process, kernels interpreted, a feature store of its own."""

import gc
import logging
import os
import random
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.command_line import Command

gc.disable()  # until all is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any test imports one
    from benchmarks.support.interpreter import adapt_language_once

    adapt_language_once()
# A run tells of the change and not of the dice, which `--hypothesis-profile=dice` throws.
# How long examples take says something about the machine, not about the code.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")
_STORE = tempfile.TemporaryDirectory(prefix="kvbench-features-")
os.environ["KVBENCH_FEATURES"] = _STORE.name
os.environ.pop("COLUMNS", None)  # of the terminal: tables have the width of a file
os.environ["KVBENCH_DEVICE"] = "cpu"  # what runs compute does not depend on the machine
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported; tests of downloads bring a Hub


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of garbage need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries complain at the end of what was not collected."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """Name tests that take too long."""
    from tests.support import brake

    config.pluginmanager.register(brake)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make nightly`."""
    parser.addoption("--brake", action="store_true", help="fail if fast tests or rooms took too long")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run tests in a random order")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests go first: at the end, every process still has short tests to share with the others."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command line sets up the root logger; the next test must not find its level and its closed streams."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which samples count as timed beside other work does not depend on what else runs on the machine."""
    waited = tmp_path_factory.mktemp("machine") / "schedstat"
    waited.write_text("0 0 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.runs.record.machine.WAITED", waited)
        yield


@pytest.fixture(autouse=True)
def _same_dice_and_threads() -> None:
    """What a test draws without a seed of its own, and how many threads compute it, does not depend on others."""
    # `torch.manual_seed` writes a stack trace for each kind of device that is not there.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    torch.set_num_threads(1)  # a training sets more, which would wait busily for each other from then on


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of the test's own: what it draws does not depend on the tests before it."""
    return np.random.default_rng(3)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of files that a test just wrote are kept at once."""
    monkeypatch.setattr("kvbench.core.kept.TICK", -(10**12))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no weights but those that a test makes."""

    def refuse(*_: object) -> None:
        raise AssertionError("network access")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KVBENCH_WEIGHTS", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Command":
    """Runs the command line in this process; gives exit status, standard output and standard error."""
    from kvbench.cli import app as cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as leaving:
            status = 1 if isinstance(leaving.code, str) else int(leaving.code or 0)
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
        out, err = capsys.readouterr()
        return status, out, err

    return call
