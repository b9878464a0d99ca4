"""Every benchmark ends at its smallest size, and prints a measured row."""

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import PROGRAMS
from tests.benchmarks.test_benchmarks import output
from tests.benchmarks.test_races import RACE
from tests.support.command_line import run_python
from tests.support.places import ROOT

ONCE = "--batch 1 --repeats 1"
STEPS = "kernels models graphs llamagen paths"  # those whose smallest rehearsal takes seconds
QUICK_PROFILE = "profile.batch_sizes=[1] profile.repeats=1 profile.warmup=0"
RUNS = {
    "compiled": ("--only gate --arch 80", r"^gate bf16 +80 "),
    "engine": (f"{ONCE} --methods heatkv", r"^heatkv( +[\d.]+){3} to [\d.]+$"),
    "gpu_check": (f"--only {STEPS} --mode smallest --out gpu.json", r"^(PASS  \w+ .*\n){5}"),
    "kernels": (ONCE, r"^attention of a whole generation: "),
    "launches": (
        "--model llamagen_3b --budget 1 --batch 1 model.transformer.depth=1 model.transformer.grid=[4,4]",
        r"^one recording( +\d+){5}$",
    ),
    "many_runs": ("1 --prompts 1", r"^((dashboard|report), (first|again) +[\d.]+ +\d\d+\n){4}"),
    "mutants": ("--rooms puzzles --per-thousand 1", r"^puzzles +[01] of   1 killed$"),
    "mutations": ("--only 'each pair has the error of the whole race'", r"^1 lines: 1 killed(, 0 \w+){3}$"),
    "profile_task": (f"{QUICK_PROFILE} method=heatkv budget=0.1", r"^written: runs/profile/infinity_tiny-heatkv-0\.1-"),
    "race_table": ("--runs .", r"^\| tiny, budget 0.1, psnr \| 0.5 \| 3 \|"),
    "races": ("--races 2 --prompts 16", r"^rare failures of 19, a look every 200 .* [01]\.\d{3}$"),
    "reads": ("--layers 1", r"^full +0\.905 +1\.000$"),
    "startup": (f"--seeds 1 --repeats 1 --program {ROOT}/run.py", r"^until the first image +[\d.]+$"),
    "tiles": ("--only 'mass bf16 64' --arch 80", r"^mass bf16 +64 +128 +80 +64x64x4x3 +64x64x4x3 +0$"),
}  # fmt: skip
"""Arguments of every benchmark, and a row that it then prints."""
WITH_HYDRA = ("mutants", "mutations", "startup")
"""Programs that call the command line or the tests."""
WITH_GIT = ("mutants", "mutations")
"""Programs that copy the files that git knows."""


def test_every_program_has_a_row() -> None:
    assert tuple(RUNS) == PROGRAMS


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    if name in WITH_GIT and not (ROOT / ".git").exists():
        pytest.skip("git's files are not here")
    race = tmp_path / "races" / "one" / "race.json"
    race.parent.mkdir(parents=True)
    race.write_text(json.dumps(RACE))
    words, row = RUNS[name]
    if name in WITH_HYDRA:
        done = run_python(tmp_path, "-m", "benchmarks", name, *shlex.split(words))
        assert done.returncode == 0, done.stderr
        text = done.stdout
    else:
        text = output(name, tmp_path, *shlex.split(words))
    assert re.search(row, text, re.MULTILINE), text
