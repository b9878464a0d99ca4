"""The benchmark that holds a calibration against the printed classes of heads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.__main__ import main
from benchmarks.printed_classes import load_printed


def test_calibrations_agree_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = load_printed()["var_d30"].contextual
    assert wanted is not None
    right, wrong, other = (tmp_path / name for name in ("right", "wrong", "other"))
    sigma = (~wanted).double() + torch.rand(30, 30, dtype=torch.float64) / 2
    save_file({"sigma": sigma, "mass": torch.zeros(1)}, right)
    save_file({"sigma": sigma.roll(1, 0)}, wrong)
    save_file({"asi": sigma}, other)
    assert main(["printed_classes", "var_d30", str(right), str(other)]) == 0
    assert capsys.readouterr().out == f"{right}: 100.0% of the heads as printed, alpha 0.35\n"
    assert main(["printed_classes", "var_d30", str(right), str(wrong)]) == 1
    assert "% of the heads as printed, alpha 0.35" in capsys.readouterr().out
    assert main(["printed_classes", "var_d30", str(other)]) == 1
    assert "no calibration of method=hack or method=hackpp" in capsys.readouterr().out


def test_layers_of_infinity_2b_match_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sigma = torch.rand(32, 16, dtype=torch.float64)
    sigma[[9, 10, 11, 16, 17, 20, 21, 22]] += 1
    save_file({"sigma": sigma}, tmp_path / "calibration")
    assert main(["printed_classes", "infinity_2b", str(tmp_path / "calibration")]) == 0
    assert "100.0% of the layers without a contextual head" in capsys.readouterr().out
