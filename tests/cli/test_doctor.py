"""`task=doctor` tells what is there and what to do about the rest."""

import importlib.metadata
from pathlib import Path

import pytest

from kvbench.cli.tasks import doctor
from kvbench.core.extras import list_extras
from tests.support.command_line import Command


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)  # which may import torch in a process of its own


@pytest.mark.slow
def test_a_machine_is_described_in_lines(tmp_path: Path, command: Command, offline: None) -> None:
    runs = tmp_path / "nothing" / "yet"
    status, out, _ = command("task=doctor", f"runs_dir={runs}")
    found = " ".join(out.split())
    assert status == 0
    for told in (
        f"kvbench {importlib.metadata.version('kvbench')}",
        "metrics ok agreement, psnr, ssim,",
        "hpsv2",
        "weights missing; get them with: make weights",
        "GiB free for runs_dir=",
        "next ok python run.py method=heatkv budget=0.04",
    ):
        assert told in found
    assert not runs.exists()


def test_a_checkout_that_is_not_installed_is_told_so(
    no_card: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is known of its extras then; importlib would raise."""
    monkeypatch.setattr(doctor, "find_version", lambda _: None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: pytest.fail("asked"))
    found = {finding.subject: finding.text for finding in doctor.examine({}, tmp_path)}
    assert found["extras"] == "kvbench runs from its checkout: pip install -e ."
    assert "kvbench not installed" in found["versions"]


def test_what_an_extra_lacks_is_named(no_card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [
        "torch>=2",
        "no-such-package>=1; extra == 'math'",
        "numpy; extra == 'text'",
        "none; extra == 'dev'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    assert list_extras() == {"math": ("no-such-package",), "text": ("numpy",)}
    found = [(one.subject, one.text) for one in doctor.examine({}, tmp_path) if "extra" in one.subject]
    assert found == [("extra math", "no-such-package missing: pip install 'kvbench[math]'")]
