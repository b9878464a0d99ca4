"""A finished run to tamper with, beside its reference."""

import shutil
from pathlib import Path

import pytest

from kvbench.runs import execute
from tests.support.fake_run import job_in
from tests.support.verification import COUNT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of five samples in batches of two, beside its reference."""
    return execute.run(job_in(tmp_path_factory.mktemp("runs"), COUNT)).folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    shutil.copytree(made.parent, tmp_path / "runs" / "fake")
    return tmp_path / "runs" / "fake" / made.name
