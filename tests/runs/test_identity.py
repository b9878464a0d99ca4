"""The hash of a run's identity follows everything that can change its samples, and nothing else."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.contents.lagkv import LagKV
from kvbench.methods.contents.norms import CUR
from kvbench.methods.critical import Critical
from kvbench.methods.h2o import H2O
from kvbench.methods.pricekv.by_score import PriceKVByScore
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs.job_identity import identify_method, make_label, revise_method
from kvbench.runs.run_hash import Identity

IDENTITY = Identity(
    model={"_target_": "kvbench.models.infinity.model.InfinityModel", "sampling": {"tau": [1.0, 0.5]}},
    weights="a" * 64,
    method={"_target_": "kvbench.methods.heatkv.method.HeatKV", "sinks": 1},
    calibration=None,
    budget="1",
    prompts="c" * 64,
    seed=0,
    cache_dtype="torch.float32",
)


@pytest.mark.parametrize("name", [field.name for field in fields(Identity) if field.name != "label"])
def test_every_field_changes_the_hash(name: str) -> None:
    assert replace(IDENTITY, **{name: {"other": 1}}).hash != IDENTITY.hash  # type: ignore[arg-type]


def test_the_label_and_the_order_of_keys_do_not() -> None:
    method = dict(reversed(IDENTITY.method.items()))
    assert replace(IDENTITY, label="heatkv-0.1", method=method).hash == IDENTITY.hash
    assert len(IDENTITY.hash) == 10


def test_runs_without_batch_invariance_keep_the_names_they_had() -> None:
    """A hash of version 0.1.0, which had no such setting."""
    assert IDENTITY.hash == "7ea5c7793f"
    assert replace(IDENTITY, batch_invariant=True).hash != IDENTITY.hash


def test_runs_with_noise_of_streams_keep_the_names_they_had() -> None:
    assert replace(IDENTITY, noise="stream").hash == "7ea5c7793f"
    assert replace(IDENTITY, noise="counter").hash != IDENTITY.hash


def test_settings_that_came_later_and_change_nothing_are_left_out() -> None:
    method = {"_target_": "kvbench.methods.snapkv.SnapKV", "window": 16, "orders": "here.json"}
    later, snapkv = {"refresh": 1, "ema": 0, "fill": False, "leading": 0}, SnapKV()
    assert identify_method(method | later, "here.json", snapkv) == {
        k: v for k, v in method.items() if k != "orders"
    }
    assert identify_method(method | later | {"refresh": 4}, object(), snapkv) == method | {"refresh": 4}
    sliding = {"sinks": 0}
    assert identify_method(sliding | {"leading": 0}, object(), StreamingLLM(0)) == sliding
    assert identify_method(sliding | {"leading": 4}, object(), StreamingLLM(0)) == sliding | {"leading": 4}


@pytest.mark.parametrize("leading", [0, 4])
def test_settings_of_bases_that_came_later_are_left_out_too(leading: int) -> None:
    """A base had `refresh` from the beginning; `leading` is as old as `lagkv` and newer than `h2o`."""
    inner, chunks = {"refresh": 1, "leading": leading}, {"chunk": 20}
    of_h2o = inner if leading else {"refresh": 1}
    for base, expected in ((H2O(), of_h2o), (LagKV(), inner)):
        found = identify_method(chunks | {"base": inner}, object(), ChunkKV(base=base))
        assert found == chunks | {"base": expected}
        twice = {"base": {"base": inner, "chunk": 5}}
        nested = ChunkKV(base=Critical(base=base))
        assert identify_method(twice, object(), nested) == {"base": {"base": expected, "chunk": 5}}


def test_later_settings_of_cur_and_pricekv_by_score_are_left_out_of_their_wrappers() -> None:
    """They do so by name, so that `window` of SnapKV stays."""
    inner: dict[str, object] = {"leading": 0, "block": 16}
    later = {"project": None, "redraw": False, "window": 0, "seed": 0}
    for settings in (inner, inner | {"window": 4}):
        found = identify_method({"base": later | settings}, object(), ChunkKV(base=CUR()))
        assert found == {"base": settings}
    priced = {"base": {"base": later | inner, "error": "output"}}
    method = ChunkKV(base=PriceKVByScore(base=CUR()))
    assert identify_method(priced, object(), method) == {"base": {"base": inner}}
    window = {"base": {"window": 0}}
    assert identify_method(window, object(), ChunkKV(base=SnapKV())) == window


def test_a_change_of_texts_leaves_the_names_of_images() -> None:
    image = ModelSpec("image", 1, 1, 8, next_scale([(1, 1), (2, 2)]))
    text = ModelSpec("text", 1, 1, 8, next_token(4, [4]))
    method = StreamingLLM(sinks=0)
    assert revise_method(method, image) == {"revision": method.revision}
    assert revise_method(method, text) == {"revision": method.revision, "text_revision": method.text_revision}


@pytest.mark.parametrize(
    ("budget", "label"), [("128", "h2o-128"), (0.25, "h2o-0.25"), (1.0, "h2o-1"), ("1/3", "h2o-0.3333")]
)
def test_a_run_is_labelled_by_the_budget_that_was_given(budget: str | float, label: str) -> None:
    spec = ModelSpec("text", 1, 1, 8, next_token(200, [100, 100]))
    requested = Budget.parse(budget, spec)
    settings = SimpleNamespace(cache_dtype="auto")
    job = SimpleNamespace(
        method=H2O(), method_name="h2o", settings=settings, allowance=SimpleNamespace(requested=requested)
    )
    assert make_label(job) == label  # type: ignore[arg-type]
