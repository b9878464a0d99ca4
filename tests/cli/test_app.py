"""The command line, on the models that ship."""

import json
import re
from pathlib import Path

import pytest

from tests.support.command_line import RUN, Command, errors, run_python


def test_main_job_then_reuse_then_report(command: Command, tmp_path: Path) -> None:
    few = ("prompts.count=4", "calibrate.count=2")
    job = ("method=heatkv", "budget=0.04", "eval=[psnr,geneval,lpips]", *few)
    status, out, _ = command(*job)
    assert status == 0
    assert out.startswith("device: cpu (KVBENCH_DEVICE)\n")
    [path] = tmp_path.glob("runs/infinity_tiny/heatkv-0.04-*/results.json")
    results = json.loads(path.read_text())
    assert results["config"]["device"] == "cpu"
    memory = results["memory"]
    assert 0 < memory["peak_tokens"] <= memory["budget_tokens"]
    assert (
        memory["peak_bytes"] <= 1.01 * memory["full_bytes"] * memory["budget_tokens"] / memory["full_tokens"]
    )
    # With six layers one may hold most of the budget, and its keys exist twice while they move.
    assert memory["peak_bytes"] <= memory["rebuild_bytes"] <= 1.5 * memory["peak_bytes"]
    assert results["metrics"]["psnr"]["n"] == 4
    assert "finished: runs/infinity_tiny/heatkv-0.04-" in out
    assert "geneval[scenes]" in out
    status, out, err = command(*job, "device=cpu")  # the same call
    assert status == 0
    assert "found finished: runs/infinity_tiny/heatkv-0.04-" in out
    assert "device:" not in out
    assert "image/s" not in err
    status, out, _ = command("task=report")
    assert status == 0
    assert "heatkv" in (tmp_path / "runs" / "report.md").read_text()
    assert "full" in out


@pytest.mark.slow
def test_bounds_later_metrics_and_differences(command: Command, tmp_path: Path) -> None:
    shared = ("prompts.count=4", "eval=[psnr,fid_scenes]")
    assert command("-m", "method=streaming_llm,swa", "budget=0.2", *shared)[0] == 0
    status, out, _ = command("task=bounds", *shared)
    assert status == 0
    assert "full, batch 4" in out
    assert "full, seed 1" in out
    assert "full, batch 4" in command("-m", "method=streaming_llm,swa", "budget=0.2", *shared)[1]
    job = ("method=streaming_llm", "budget=0.2", "prompts.count=4")
    assert "ssim" in command("task=evaluate", *job, "eval=ssim")[1]
    assert command("task=evaluate", "method=swa", "budget=0.5", *shared)[0] == 1
    status, out, _ = command("task=report", "against=streaming_llm")
    assert status == 0
    report = (tmp_path / "runs" / "report-against-streaming_llm.md").read_text()
    assert "difference to streaming_llm at the same budget" in out
    names, _, row = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("|")]
    assert row[:3] == ["swa", "0.2", "4"]
    assert names == ["method", "budget", "n", "psnr ↑", "psnr_mean_mse ↑", "fid_scenes ↓"]
    assert all(" [" in cell for cell in row[3:])  # also the distance has an interval of its own
    _, out, wrong = command("task=report", "against=h2o")
    assert "against=h2o: no finished run has that method or name" in wrong
    assert "psnr" not in out  # before the tables


@pytest.mark.slow
def test_heatkv_reads_an_order_file_and_a_profile_the_calibration_of_a_run(
    command: Command, tmp_path: Path
) -> None:
    few = ("prompts.count=2", "calibrate.count=2")  # what is evaluated decides what is calibrated on
    status, out, _ = command("task=calibrate", "calibrate.orders=orders.json", *few)
    assert status == 0
    assert "orders: orders.json" in out
    assert len(json.loads((tmp_path / "orders.json").read_text())["orders"]) == 9 - 1 - 1
    job = ("method=heatkv", "budget=0.1", "eval=none", *few)
    assert command(*job, "method.orders=orders.json")[0] == 0
    assert command(*job)[0] == 0
    first, second = (tmp_path / "runs/infinity_tiny").glob("heatkv-0.1-*")
    for index in range(2):
        image = f"images/{index:06d}.png"
        assert (first / image).read_bytes() == (second / image).read_bytes()
    quick = ("profile.batch_sizes=[1]", "profile.warmup=0", "profile.repeats=1")
    status, out, _ = command("task=profile", "method=heatkv", "budget=0.1", *few, *quick)
    assert status == 0
    assert "calibration: runs/infinity_tiny/calibration-" in out


def test_configuration_is_shown(command: Command) -> None:
    """Settings may stand on both sides of an option."""
    status, out, err = command("seed=3", "--cfg", "job", "budget=0.04")
    assert (status, errors(err)) == (0, [])
    assert "\nbudget: 0.04\n" in out
    assert "\nseed: 3\n" in out
    status, out, err = command("budget=0.04", "-m", "seed=1,2", "--cfg", "job", "method=swa")
    assert (status, errors(err)) == (0, [])
    assert out.splitlines()[1:] == ["0  budget=0.04 seed=1 method=swa", "1  budget=0.04 seed=2 method=swa"]


@pytest.mark.slow
def test_program_starts_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    words = ("task=plan", "method=streaming_llm", "budget=0.1")
    done = run_python(tmp_path, RUN, *words, OMP_DISPLAY_ENV="true", PYTHONPATH="")
    assert done.returncode == 0
    assert re.search(r"OMP_WAIT_POLICY\W+PASSIVE", done.stderr), (
        "threads that wait take the processor from others"
    )
    assert "infinity_tiny" in done.stdout
    assert list(tmp_path.iterdir()) == []
