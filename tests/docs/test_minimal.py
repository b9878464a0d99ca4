"""docs/examples/minimal.py: rows and a method of its own, and the bytes of the engine."""

import re
import runpy
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import kvbench
from kvbench.core.budget import Budget
from kvbench.engine.cache import KVCache
from kvbench.methods.h2o import H2O

FILE = Path(__file__).parents[2] / "docs" / "examples" / "minimal.py"
OURS = {"kvbench.core.segments", "kvbench.models.base", "kvbench.models.noise", "kvbench.scenes.grammar"}


@pytest.fixture(scope="module")
def minimal() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FILE)))


def test_it_imports_nothing_of_engine_methods_runs_and_kernels() -> None:
    assert {*re.findall(r"^ *(?:from|import) (kvbench[\w.]*)", FILE.read_text(), re.MULTILINE)} == OURS


@pytest.mark.parametrize("share", [0.04, 0.37, 1])
def test_the_engine_draws_the_same_bytes_and_holds_as_much(minimal: SimpleNamespace, share: float) -> None:
    model = minimal.load_model(minimal.MODEL)
    spec, prompts = model.spec, [str(line["prompt"]) for line in minimal.evaluation_prompts(2)]
    method, budget = H2O(sinks=1), Budget.parse(share, spec)
    method.check(spec, budget)
    method.prepare(spec, budget)
    engine = KVCache(spec, method, dtype=torch.float32)
    rows = minimal.RowCache(spec, minimal.H2O(spec), share)

    assert torch.equal(minimal.draw(model, prompts, rows), minimal.draw(model, prompts, engine))
    assert rows.peak == engine.ledger.peak_tokens <= rows.budget == budget.tokens


@pytest.mark.slow
def test_a_run_has_its_images_and_its_psnr(
    minimal: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, reference = minimal.main()
    run = kvbench.run(
        "h2o", budget=minimal.BUDGET, prompts={"count": len(images)}, eval=["psnr"], runs_dir=tmp_path
    )
    assert run.reference is not None
    for one, drawn in ((run, images), (run.reference, reference)):
        stored = [np.asarray(Image.open(one.find_sample(index))) for index in range(len(drawn))]
        assert np.array_equal(stored, drawn.numpy())
    decibels = minimal.measure_psnr(images, reference)
    assert run.metrics["psnr"].value == pytest.approx(fmean(decibels), abs=1e-9)
    printed = capsys.readouterr().out
    assert "918 of 918 tokens, all are 9180" in printed
    assert f"{decibels[0]:.2f} dB" in printed
