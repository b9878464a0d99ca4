"""The benchmark that holds a calibration against the printed classes of heads."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbench.methods.hack.printed import load_printed
from tests.support.places import ROOT


def tell(monkeypatch: pytest.MonkeyPatch, model: str, *paths: Path) -> int:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["printed_classes.py", model, *map(str, paths)])
    status: int = importlib.import_module("printed_classes").main()
    return status


def test_calibrations_agree_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = load_printed()["var_d30"].contextual
    assert wanted is not None
    right, wrong, other = (tmp_path / name for name in ("right", "wrong", "other"))
    sigma = (~wanted).double() + torch.rand(30, 30, dtype=torch.float64) / 2
    save_file({"sigma": sigma, "mass": torch.zeros(1)}, right)
    save_file({"sigma": sigma.roll(1, 0)}, wrong)
    save_file({"asi": sigma}, other)
    assert tell(monkeypatch, "var_d30", right, other) == 0
    assert capsys.readouterr().out == f"{right}: 100.0% of the heads as printed, alpha 0.35\n"
    assert tell(monkeypatch, "var_d30", right, wrong) == 1
    assert "% of the heads as printed, alpha 0.35" in capsys.readouterr().out
    assert tell(monkeypatch, "var_d30", other) == 1
    assert "no calibration of method=hack or method=hackpp" in capsys.readouterr().out


def test_layers_of_infinity_2b_are_held_against_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sigma = torch.rand(32, 16, dtype=torch.float64)
    sigma[[9, 10, 11, 16, 17, 20, 21, 22]] += 1
    save_file({"sigma": sigma}, tmp_path / "calibration")
    assert tell(monkeypatch, "infinity_2b", tmp_path / "calibration") == 0
    assert "100.0% of the layers without a contextual head" in capsys.readouterr().out
