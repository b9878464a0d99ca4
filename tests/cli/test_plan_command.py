"""`task=plan`: schedule and memory from shapes alone."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvbench.core import checkpoint
from kvbench.report.papers import memory
from tests.support.command_line import Command, errors


@pytest.mark.slow
def test_memory_column_of_a_paper_from_shapes(command: Command) -> None:
    status, out, _ = command("task=plan", "plan.table=heatkv_table1")
    assert status == 0
    assert out.count("reproduced") == 8
    assert "17062.5 MiB" in out
    for name in memory.TABLES:
        status, out, err = command("task=plan", f"plan.table={name}")
        assert (status, errors(err)) == (0, [])
        assert "reproduced" in out or "left out: model=var_d30 has no configuration here" in out


@pytest.mark.slow
def test_plan_needs_no_weights(command: Command, tmp_path: Path) -> None:
    plan = "task=plan model=infinity_2b method=heatkv budget=0.1 batch_size=8 plan.export=out.npz"
    status, out, _ = command(*plan.split())
    assert status == 0
    assert "38550.0" in out
    assert "328960" in out
    schedule = np.load(tmp_path / "out.npz")
    assert schedule["G"].shape == (13, 13, 32, 16)
    assert schedule["cached_after"].max() <= schedule["B"] == 328960
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_policy_of_positions_needs_no_weights(command: Command, tmp_path: Path) -> None:
    words = ("task=export", "export.policy=out.safetensors", "model=infinity_2b", "method=streaming_llm")
    status, out, _ = command(*words, "budget=0.1")
    assert (status, out) == (0, "written: out.safetensors\n")
    tensors, metadata = checkpoint.load(tmp_path / "out.safetensors")
    held = (tensors["dropped_after"] == 12).sum()
    assert 0 < held <= 328960
    assert metadata["model"]["weights_sha256"] is metadata["calibration_sha256"] is None  # type: ignore[index]
    assert metadata["method"]["name"] == "streaming_llm"  # type: ignore[index]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_plan_of_a_budget_in_bytes(command: Command) -> None:
    """A tenth of 1 175 040 bytes; a token in one head has 64 numbers."""
    words = ("task=plan", "method=first_scales", "budget=0.1", "budget_unit=bytes", "cache_dtype=float32")
    status, out, _ = command(*words)
    assert status == 0
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    [budget] = [row[1:4] for row in rows if "budget B, in bytes" in row[0]]
    [held] = [int(row[1]) for row in rows if "peak of the method" in row[0]]
    assert budget == ["459", "114.8", "10.00"]
    assert 0.95 * 459 < held <= 459


STORED = """
device=cpu                          | 256 bytes, float32  | 200.00 | 10.65 full | bfloat16: 25803 full
device=cuda                         | 128 bytes, bfloat16 | 100.00 | 5.326 full | bfloat16: 25803 full
plan.gpu_gib=24 cache_dtype=float32 | 256 bytes, float32  | 200.00 | 10.65 full | float32: 4297 full
"""
"""Words | a token in one head, its % of 16 bits, MiB that attention reads and the largest batch."""


@pytest.mark.slow
@pytest.mark.parametrize("row", STORED.strip("\n").splitlines())
def test_dtype_of_a_plan(command: Command, row: str) -> None:
    """A question about a GPU is answered for what a run there stores, on any machine."""
    words, *expected = map(str.strip, row.split("|"))
    status, out, _ = command("task=plan", "method=full", *words.split())
    assert (status, [text for text in expected if text not in out]) == (0, []), out


def test_plan_of_a_class_conditional_model(command: Command) -> None:
    status, out, _ = command("task=plan", "model=var_d30", "method=full")
    assert status == 0
    assert "var_d30: tokens one sequence holds" in out
    assert "381600" in out  # 30 layers, 30 heads, 424 tokens before the last scale


@pytest.mark.slow
def test_plan_of_a_card_has_its_floors(command: Command) -> None:
    """Of a model of 6 layers of 12 128^2 weights and 9 scales; the decoder's figure is torch's."""
    status, out, _ = command(
        "task=plan", "model=var_tiny", "method=streaming_llm", "budget=0.1", "device=h200"
    )
    assert status == 0
    assert "H200 SXM (989 TFLOP/s in 16 bits, 4800 GB/s: NVIDIA H200 datasheet)" in out
    table = out.split("least time")[1].splitlines()
    lines = [
        re.split(r" {2,}", line.strip()) for line in table if re.search(r"\d {2,}[\d.]+$", line.rstrip())
    ]
    rows = {name: [float(cell) for cell in cells] for name, *cells in lines}
    full, method = rows["attention"][:3], rows["attention"][3:]
    assert all(own < whole for own, whole in zip(method, full, strict=True))
    weights = 6 * 12 * 128**2 + 128 * 256
    assert rows["transformer"][1] == rows["transformer"][4] == pytest.approx(9 * 2 * weights / 1e9, rel=1e-3)
    assert rows["sum"][2] == pytest.approx(
        sum(row[2] for name, row in rows.items() if name != "sum"), rel=1e-3
    )
