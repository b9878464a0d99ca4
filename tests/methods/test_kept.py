"""Tokens that methods keep in a cache, with their keys and values, against plain loops.

Two layers of two heads with two query heads each run a prompt with padding and two segments after it, or five maps. The
methods that are not here are compared with such loops or other authors' programs in tests of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from kvbench.core.segments import ModelSpec
from kvbench.methods.adakv import AdaKV
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.contents.compactor import Compactor, Leverage, NonCausal
from kvbench.methods.contents.lagkv import LagKV
from kvbench.methods.contents.norms import CUR, KeyNorm
from kvbench.methods.critical import Critical
from kvbench.methods.dropkv import DropKV
from kvbench.methods.expected.capkv import CapKV
from kvbench.methods.expected.method import ExpectedAttention
from kvbench.methods.first_scales import FirstScales
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.lukv.method import LUKV
from kvbench.methods.merging.method import D2O, CaM, LookM, MergingPress
from kvbench.methods.pricekv.forecast import Forecast
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.random import Random
from kvbench.methods.rkv import RKV
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import TOVA
from kvbench.methods.triattention import TriAttention
from tests.methods.kept import contents, futures, merges
from tests.support import plain_rules as rules
from tests.support.conformance import artifact_for
from tests.support.plain_cache import MAPS, PADDING, TEXT, Case, check
from tests.support.plain_rules import compete, keep_best

EVEN = ((6, 6), (6, 6))
WIDE = ((10, 9), (9, 9))
LAST: dict[str, Any] = {"window": 3, "queries": "last"}
SNAPKV = rules.snapkv(3)


def snapkv(**more: Any) -> SnapKV:
    return SnapKV(**LAST, kernel=3, pool="max", **more)


def calibrated(method: Any, spec: ModelSpec) -> Artifact:
    """A calibration of random numbers."""
    assert isinstance(method.needs(), Observer)
    artifact = artifact_for(method, spec)
    assert artifact is not None
    return artifact


def expect_calibrated() -> Case:
    method = ExpectedAttention(statistics="calibrated", heads="even")
    artifact = calibrated(method, MAPS)
    return Case(method, keep_best(futures.calibrated_attention(artifact.tensors, 0.02)), artifact=artifact)


def forecast() -> Case:
    method = Forecast(decay=0.6, surprise=0.7, memory=0.5, contrast=0.4)
    artifact = calibrated(method, MAPS)
    return Case(method, keep_best(futures.forecast(artifact.tensors, 0.6, 0.7, 0.5, 0.4)), artifact=artifact)


def share() -> Case:
    """Shares that are the same part of any budget."""
    room = ((8, 5), (7, 5))
    part = torch.tensor(room) / 25 * 4
    left = 1 - torch.arange(1, 100)[:, None, None] / 100
    artifact = Artifact("budget_shares", {"pruned": (1 - part * left).double()})
    return Case(LUKV(base=H2O()), keep_best(rules.h2o(0.5)), room, artifact)


def centre() -> Case:
    method = TriAttention(horizon=4, recent=2)
    artifact = calibrated(method, TEXT)
    return Case(method, keep_best(futures.triattention(artifact.tensors, 4, 2)), artifact=artifact)


CASES: Mapping[str, Callable[[], Case]] = {
    "knorm": lambda: Case(KeyNorm(), keep_best(contents.norms)),
    "keydiff": lambda: Case(KeyDiff(), keep_best(contents.differences)),
    "leverage": lambda: Case(Leverage(sketch=5), keep_best(contents.leverage(5))),
    "noncausal": lambda: Case(NonCausal(chunk=4), keep_best(contents.noncausal(4))),
    "cur": lambda: Case(CUR(block=3, leading=2), keep_best(contents.cur(2, 3))),
    "tova": lambda: Case(TOVA(), keep_best(rules.tova)),
    "snapkv": lambda: Case(snapkv(), keep_best(SNAPKV)),
    "snapkv in little room": lambda: Case(
        SnapKV(window=4, queries="last"), keep_best(rules.snapkv(1, 5)), EVEN
    ),
    "snapkv mean": lambda: Case(SnapKV(**LAST, kernel=3, pool="avg"), keep_best(rules.snapkv(3, 3, "avg"))),
    "snapkv outside": lambda: Case(
        SnapKV(**LAST, kernel=3, pool="avg", softmax="prefix", group="max"),
        keep_best(rules.snapkv(3, 3, "avg", outside=True)),
    ),
    "h2o": lambda: Case(H2O(), keep_best(rules.h2o(0.5))),
    "h2o no recent": lambda: Case(H2O(recent=0.0), keep_best(rules.h2o(0.0))),
    "rkv": lambda: Case(RKV(**LAST, mix=0.3, threshold=0.2, kernel=3), keep_best(rules.rkv(3, 0.3, 0.2))),
    "rkv protected": lambda: Case(
        RKV(**LAST, mix=0.1, threshold=0.1, kernel=3, protected=2), keep_best(rules.rkv(3, 0.1, 0.1, 2))
    ),
    "dropkv": lambda: Case(DropKV(**LAST, kernel=3), keep_best(rules.dropkv(3, 3))),
    "random": lambda: Case(Random(), keep_best(rules.random)),
    "adakv": lambda: Case(AdaKV(**LAST, kernel=3, pool="max"), compete(SNAPKV, 0.2)),
    "pyramidkv": lambda: Case(  # 8 = 3 of the window and a mean of 5, from 9 to 1
        PyramidKV(**LAST, kernel=3, pool="max"), keep_best(SNAPKV), ((12, 12), (4, 4))
    ),
    "expected_attention": lambda: Case(
        ExpectedAttention(future=3, leading=2), compete(futures.expected_attention(2, 3, 0.02, "value"), 0.2)
    ),
    "expected_attention output": lambda: Case(
        ExpectedAttention(future=3, norm="output", heads="even", queries=4),
        keep_best(futures.expected_attention(0, 3, 0.02, "output", 4)),
    ),
    "capkv": lambda: Case(CapKV(future=3, leading=2), keep_best(futures.capkv(2, 3, 5.0))),
    "criticalkv": lambda: Case(Critical(base=snapkv(), first=0.6), rules.critical(SNAPKV, 0.6, 1e-4), WIDE),
    "critical_adakv": lambda: Case(
        Critical(base=AdaKV(window=1, queries="last", kernel=1, safeguard=0.75), first=0.1),
        rules.critical(rules.snapkv(1, 1), 0.1, 1e-4, 0.75),
    ),
    "chunkkv": lambda: Case(ChunkKV(base=snapkv(), chunk=3), rules.chunkkv(SNAPKV, 3), ((9, 9), (9, 9))),
    "lukv": share,
    "cam": lambda: Case(CaM(base=TOVA(), merge_budget=3), merges.cam(rules.tova, 3, "bernoulli"), EVEN),
    "cam expected": lambda: Case(
        CaM(base=TOVA(), merge_budget=3, sample="expected"), merges.cam(rules.tova, 3, "expected")
    ),
    "cam adakv": lambda: Case(
        CaM(base=AdaKV(**LAST, kernel=3, pool="max", safeguard=0.1), merge_budget=3, sample="expected"),
        merges.cam(SNAPKV, 3, "expected", 0.1),
    ),
    "lookm": lambda: Case(LookM(base=H2O()), merges.lookm(rules.h2o(0.5), "pivot")),
    "lookm renormalised": lambda: Case(
        LookM(base=H2O(), how="weighted", renormalise=True, similarity="unrotated"),
        merges.lookm(rules.h2o(0.5), "weighted", renormalise=True, unrotated=True),
    ),
    "merging": lambda: Case(
        MergingPress(base=snapkv(), threshold=0.1), merges.merging_press(SNAPKV, 0.1), WIDE
    ),
}
"""Methods of all families, by the name of their file."""
OF_TEXTS: Mapping[str, Callable[[], Case]] = {
    "compactor": lambda: Case(
        Compactor(chunk=4, leading=2, trailing=2, sketch=5),
        keep_best(contents.compactor(4, 0.35, 2, 2, 5)),
        WIDE,
    ),
    "lagkv": lambda: Case(LagKV(lag=4, leading=1), keep_best(contents.lagkv(4, 1)), WIDE),
    "d2o": lambda: Case(D2O(base=H2O(), alpha=0.7, beta=0.2), merges.d2o(rules.h2o(0.5), 0.7, 0.2)),
    "triattention": centre,
    "streaming_llm": lambda: Case(StreamingLLM(sinks=0, leading=2), rules.latest(2)),
    "swa": lambda: Case(StreamingLLM(sinks=0), rules.latest(0)),
    "diagonal": lambda: Case(
        StreamingLLM(sinks=1, leading=1), rules.latest(1, sinks=1), ((17, 16), (16, 16))
    ),
    "first_scales": lambda: Case(FirstScales(), keep_best(rules.earliest)),
}
OF_MAPS: Mapping[str, Callable[[], Case]] = {
    "sta": lambda: Case(StreamingLLM(sinks=2), rules.latest(0, sinks=2)),
    "compactor": lambda: Case(
        Compactor(chunk=4, trailing=1, sketch=1), keep_best(contents.compactor(4, 0.35, 0, 1, 1)), WIDE
    ),
    "lagkv": lambda: Case(LagKV(), keep_best(contents.lagkv(None, 0)), WIDE),
    "expected_attention calibrated": expect_calibrated,
    "forecast": forecast,
    "h2o observed": lambda: Case(H2O(observed=5), keep_best(rules.h2o(0.5, 5))),
    "h2o per query": lambda: Case(
        H2O(norm="per_query", observed=5), keep_best(rules.h2o(0.5, 5, per_query=True))
    ),
}


ALIKE = ("chunkkv", "expected_attention", "h2o", "lagkv", "random", "snapkv")
"""Methods of which some code runs only if no prompt has padding."""


@pytest.mark.parametrize(
    ("name", "padding"),
    [*((name, PADDING) for name in (*CASES, *OF_TEXTS)), *((name, (0, 0)) for name in ALIKE)],
)
def test_a_text_keeps_what_the_rule_says(name: str, padding: tuple[int, ...]) -> None:
    check({**CASES, **OF_TEXTS}[name](), TEXT, padding)


@pytest.mark.parametrize("name", [*CASES, *OF_MAPS])
def test_maps_keep_what_the_rule_says(name: str) -> None:
    check({**CASES, **OF_MAPS}[name](), MAPS, (0, 0))


def test_keys_that_do_not_rotate_are_compared_as_they_are() -> None:
    for name in ("leverage", "expected_attention", "capkv"):
        check(CASES[name](), TEXT, PADDING, rotated=False)
