"""What tests of the command line share."""

import sys
from pathlib import Path

import pytest

from kvbench.cli import app as cli
from tests.support.command_line import Command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process; gives exit status, standard output and standard error."""
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
