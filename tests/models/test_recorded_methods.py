"""Every method of next-scale models on a tape: the pixels and the ledger of launches, for one prompt after another."""

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.build import built, composed
from benchmarks.support.tape import Tape
from kvbench.core.budget import Budget
from kvbench.core.graphs import GraphRecorder
from kvbench.engine.cache import KVCache
from kvbench.engine.ledger import Ledger
from kvbench.engine.schedule import predict_row_lengths
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Observer
from kvbench.models.noise import PromptNoise
from tests.support.marks import slow_except
from tests.support.methods import methods_for
from tests.support.places import ROOT

PROMPTS = {
    "infinity_tiny": (
        ("a red circle", "a blue cross"),
        ("a green ring", "two red rings"),
        ("a cyan cross",) * 2,
    ),
    "var_tiny": (("1", "2"), ("3", "4"), ("5", "0")),
}
QUICK = {("var_tiny", "snapkv"), ("infinity_tiny", "h2o")}


@cache
def loaded(name: str) -> Any:
    model = built(composed([f"model={name}"])["model"])
    model.load("cpu")
    return model


def prepared(model: str, name: str, budget: str, *overrides: str) -> Method:
    spec = loaded(model).spec
    method: Method = built(composed([f"model={model}", f"method={name}", *overrides])["method"])
    needs = method.needs()
    artifact = needs.make_stand_in(spec) if isinstance(needs, Observer) else None
    method.prepare(spec, Budget.parse("1" if name == "full" else budget, spec), artifact)
    return method


def open_cache(model: str, method: Method, record: GraphRecorder | None = None) -> KVCache:
    one = loaded(model)
    options = {"rotation": one.key_rotation(), "projection": one.output_projection}
    return KVCache(one.spec, method, dtype=torch.float32, record=record, **options)


def generate(model: str, cache: KVCache, number: int) -> tuple[Tensor, Ledger]:
    one, prompts = loaded(model), PROMPTS[model][number]
    cache.prompts = [2 * number, 2 * number + 1]
    images = one.generate([*prompts], cache, PromptNoise(0, cache.prompts))
    cache.ledger.read_unprotected(one.spec.heads)
    return images, cache.ledger


def check(model: str, name: str, budget: str, *overrides: str) -> None:
    tape = Tape()
    plain = open_cache(model, prepared(model, name, budget, *overrides))
    recorded = open_cache(model, prepared(model, name, budget, *overrides), tape)
    assert (recorded.repetitions is None) == (recorded.method.graph_obstacle is not None)
    if recorded.repetitions is None:
        return
    for number in range(len(PROMPTS[model])):
        (expected, counts), (found, told) = (generate(model, one, number) for one in (plain, recorded))
        assert torch.equal(found, expected)
        assert told == counts
    scales = len(loaded(model).spec.segments)
    assert (tape.recorded, tape.repeated) == (scales, 2 * scales)


@pytest.fixture(autouse=True)
def _same_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a tape are padded, which changes the rounding; those of this test are equally long."""
    monkeypatch.setattr("kvbench.models.infinity.loop.PADDING_MULTIPLE", 1)


@pytest.mark.parametrize(
    ("model", "name"),
    slow_except(
        QUICK.__contains__, [(model, name) for model in PROMPTS for name in methods_for("next-scale")]
    ),
)
def test_a_tape_draws_the_same_pixels(model: str, name: str) -> None:
    for budget in ("0.3", "0.6"):
        check(model, name, budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("h2o", ("method.norm=per_query", "method.refresh=3")),
        ("snapkv", ("method.refresh=3", "method.ema=0.5", "method.branch_mode=mean")),
        ("expected_attention", ("method.heads=even",)),
        ("cam", ("method.sample=expected",)),
        ("scalekv", ("method.released_queries=true",)),
        ("noncausal", ()),
    ],
)
def test_settings_that_change_what_is_recorded(name: str, overrides: tuple[str, ...]) -> None:
    check("var_tiny", name, "0.3", *overrides)


def test_a_method_without_an_obstacle_knows_its_lengths() -> None:
    for name in methods_for("next-scale"):
        method = prepared("var_tiny", name, "0.6")
        if method.graph_obstacle is None:
            assert predict_row_lengths(method.spec, method) is not None, name


def test_the_page_lists_what_is_recorded() -> None:
    """Methods and reasons in docs/gpu.md are those of the classes, at the settings of conf/method."""
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    text = page.partition("| why no scale is recorded |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", text, re.MULTILINE)
    listed = {name: reason for names, reason in rows for name in re.findall(r"\w+", names)}
    found = {
        name: obstacle
        for name in (*methods_for("next-scale"), "kvpress")
        if (obstacle := built(composed([f"method={name}"])["method"]).graph_obstacle) is not None
    }
    assert listed == found
