"""Recorded scales under every method: the draws and the ledger of launches, and no wait on a simulated GPU."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.build import built, composed
from benchmarks.support.device_watch import DeviceWatch, list_tensors
from benchmarks.support.tape import Tape
from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.models.noise import PromptNoise
from tests.support.engine import open_cache
from tests.support.methods import mark_by_kind, methods_for
from tests.support.places import ROOT
from tests.support.scale_models import SPEC, Draw, infinity, var
from tests.support.small_models import load

METHODS = methods_for("next-scale")
EMBEDDED = {
    "infinity_tiny": ["a red circle", "a blue cross", "a green ring", "two red rings"],
    "var_tiny": ["1", "2", "3", "4"],
}


FEWER = {"scale_groups": ("method.condensed=1",)}
"""Settings that fit four scales."""
SHALLOW = ("model.pixels=0.06M", "model.transformer.depth=2", "model.transformer.block_chunks=1")


def ready(name: str, spec: ModelSpec, *overrides: str) -> tuple[Method, Artifact | None]:
    """A method, and random numbers for what it calibrates."""
    method: Method = built(composed([f"method={name}", *overrides])["method"])
    needs = method.needs()
    return method, needs.make_random_artifact(spec) if isinstance(needs, Observer) else None


def check(draw: Draw, spec: ModelSpec, name: str, budget: str, *overrides: str) -> None:
    """A tape draws the same and counts the same, for one batch after another; conformance repeats twice."""
    tape, budget = Tape(), "1" if name == "full" else budget
    options = {"rotation": draw.rotation, "projection": draw.project}
    caches = []
    for record in (None, tape):
        method, artifact = ready(name, spec, *overrides)
        caches.append(open_cache(method, spec, budget, artifact, record=record, **options))
    plain, recorded = caches
    assert (recorded.repetitions is None) == (recorded.method.graph_obstacle is not None)
    if recorded.repetitions is None:
        return
    for number in range(2):
        found = []
        for one in (plain, recorded):
            one.prompts = [2 * number, 2 * number + 1]
            found.append(draw(one, 2, number, words=3))
            one.ledger.read_unprotected(spec.heads)
        assert torch.equal(*found)
        assert recorded.ledger == plain.ledger
    scales = len(spec.segments)
    assert (tape.recorded, tape.repeated) == (scales, scales)


@pytest.fixture(autouse=True)
def _same_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a tape are padded, which changes the rounding; those of this test are equally long."""
    monkeypatch.setattr("kvbench.models.infinity.loop.PADDING_MULTIPLE", 1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("model", "budget"), [(infinity, "0.6"), (var, "0.8")])
def test_a_tape_draws_the_same_codes(model: Callable[[], Draw], budget: str, name: str) -> None:
    check(model(), SPEC, name, budget, "sinks=1", *FEWER.get(name, ()))


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
    check(var(), SPEC, name, "0.6", "sinks=1", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [("var_tiny", "snapkv"), ("infinity_tiny", "h2o")])
def test_a_tape_draws_the_same_pixels(model: str, name: str) -> None:
    one = load(f"model={model}")

    def draw(cache: KVCache, prompts: int, number: int, _: int | None) -> Tensor:
        return one.generate(EMBEDDED[model][number : number + prompts], cache, PromptNoise(0, cache.prompts))

    check(Draw(draw, one.key_rotation(), one.output_projection), one.spec, name, "0.3", f"model={model}")


class Strict(DeviceWatch):
    """Refuses what a capture refuses."""

    def note_read(self, number: Tensor) -> None:
        """A number is read on the host."""
        raise AssertionError("a number is read on the host")

    def note_operation(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Tensors of the host that have dimensions are copied, whatever the operation."""
        tensors = [tensor for tensor in list_tensors((args, kwargs)) + results if tensor.dim()]
        assert len({tensor.device.type for tensor in tensors}) < 2, func


def obstacle(name: str) -> str | None:
    return built(composed([f"method={name}"])["method"]).graph_obstacle


@pytest.mark.parametrize("name", mark_by_kind([name for name in METHODS if obstacle(name) is None], "snapkv"))
def test_a_recording_waits_for_nothing(name: str) -> None:
    """Host reads and host copies of recorded work on a simulated GPU: there are none."""
    pytest.importorskip("triton")
    fake_gpu = importlib.import_module("benchmarks.support.fake_gpu")

    class Checked(fake_gpu.CountedReplays):
        def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
            with Strict():
                return super().__call__(work)

    budget = "1" if name == "full" else "0.3"
    words = ["model=infinity_2b", f"method={name}", f"budget={budget}", *SHALLOW]
    model, method = fake_gpu.prepare(words)
    record = Checked()
    fake_gpu.run(model, method, 2, DeviceWatch(), before=2, record=record)
    assert record.replays == len(model.spec.segments)


def test_the_page_lists_what_is_recorded() -> None:
    """Methods and reasons in docs/gpu.md are those of the classes, at the settings of conf/method."""
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    text = page.partition("| why no scale is recorded |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", text, re.MULTILINE)
    listed = {name: reason for names, reason in rows for name in re.findall(r"\w+", names)}
    found = {name: obstacle(name) for name in (*METHODS, "kvpress")}
    assert listed == {name: reason for name, reason in found.items() if reason is not None}
