"""The check of a GPU: verdicts by outcomes, detection of wrong results, and a rehearsal of all steps."""

import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import STEPS, Step
from benchmarks.gpu_steps import kernels
from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, Outcome, Skipped, run_cases
from benchmarks.gpu_steps.generations import compare, measure_agreement, measure_psnr
from benchmarks.gpu_steps.machine import list_cases
from benchmarks.gpu_steps.timing import find_idle
from kvbench.models.outputs import Text
from tests.support.places import ROOT
from tests.support.triton_device import needs_loops


def test_a_case_that_fails_stops_no_other(tmp_path: Path) -> None:
    errors = {"a": Failed("off by 3"), "b": RuntimeError("illegal access\nmore"), "c": Skipped("one GPU")}

    def end(name: str) -> Figures:
        raise errors[name]

    cases = [*(Case(name, partial(end, name)) for name in errors), Case("d", lambda: {"error": 0.5})]
    found = run_cases(iter(cases), tmp_path / "cases.json")
    assert [one.state for one in found] == ["FAIL", "FAIL", "SKIP", "PASS"]
    assert [one.reason for one in found] == ["off by 3", "RuntimeError: illegal access", "one GPU", ""]
    written = json.loads((tmp_path / "cases.json").read_text())
    assert [Outcome(**one) for one in written] == found
    state, reason = gpu_check.judge(written, "")
    assert (state, reason) == ("FAIL", "a: off by 3 (and 1 more)")
    assert gpu_check.judge(written[2:], "") == ("PASS", "1 cases, 1 skipped")
    assert gpu_check.judge(written[2:3], "") == ("SKIP", "one GPU")
    assert gpu_check.judge(written[3:], "stopped after 5 s")[0] == "FAIL"


def test_a_step_is_stopped_and_a_crash_is_told() -> None:
    environment = {"PATH": ""}
    stopped, _ = gpu_check.call([sys.executable, "-c", "import time; time.sleep(60)"], environment, 1)
    assert stopped == "stopped after 1 s"
    crashed, lines = gpu_check.call(
        [sys.executable, "-c", "import os; print('last', flush=True); os.abort()"], environment, 60
    )
    assert "exit status -6" in crashed
    assert lines == ["last"]
    assert gpu_check.call([sys.executable, "-c", ""], environment, 60) == ("", [])


@pytest.mark.slow
def test_the_machine_is_described(tmp_path: Path) -> None:
    """The step compiles kernels, too, which `tests/kernels/test_compiled.py` does for all."""
    found = run_cases(islice(list_cases(Machine("smallest")), 2), tmp_path / "cases.json")
    assert [(one.name, one.state, one.reason) for one in found] == [
        ("provenance", "PASS", ""),
        ("doctor", "PASS", ""),
    ]


def test_steps_have_modules_and_compile_where_they_must() -> None:
    assert all((ROOT / "benchmarks" / "gpu_steps" / f"{name}.py").is_file() for name in STEPS)
    assert gpu_check.choose_environment(Step("a", "", 1), "smallest")["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in gpu_check.choose_environment(STEPS["machine"], "smallest")
    assert "TRITON_INTERPRET" not in gpu_check.choose_environment(STEPS["kernels"], "card")


def test_idle_time_is_what_no_span_covers() -> None:
    assert find_idle([(0, 1), (0.5, 2), (3, 4), (3.2, 3.4)]) == pytest.approx(1 / 4)
    assert find_idle([(5, 6)]) == 0
    with pytest.raises(ValueError, match="nothing"):
        find_idle([])


def test_nearness_of_images_and_texts() -> None:
    one = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    other = one.clone()
    other[1] = 51
    assert compare(one, other) == [100, pytest.approx(13.979, abs=1e-3)]  # a fifth of the range: 20 log10 5
    assert measure_psnr(one[0], one[0]) == 100
    assert measure_agreement(Text("abcd", 4, True), Text("abxd", 4, True)) == 0.5
    assert measure_agreement(Text("ab", 2, True), Text("abcd", 4, True)) == 0.5
    assert measure_agreement(Text("", 0, True), Text("", 0, True)) == 1


@needs_loops
def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of four that is off by a hundredth, which a mean over all would hide."""
    machine = Machine("smallest")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, a rehearsal interprets them")
    shape = kernels.Shape(2, 3, (0, 3, 40, 7), 16)

    def check() -> Figures:
        return kernels.check_attention(
            machine, lambda: kernels.make_inputs(machine, shape, torch.float16), "kernel"
        )

    assert check()["error"] < 2**-11
    attend = kernels.ragged_attention

    def attend_wrongly(*given: object, **settings: object) -> object:
        out, lse = attend(*given, **settings)
        out[:, 2] *= 1.01
        return out, lse

    monkeypatch.setattr(kernels, "ragged_attention", attend_wrongly)
    with pytest.raises(Failed, match="relative error of the output"):
        check()
